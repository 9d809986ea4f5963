"""GBNF accepts what llama.cpp accepts, and says where it cannot be read."""

import pytest

import monge
from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.requests.gbnf import lark_of_gbnf


@pytest.fixture(scope="module")
def decoder():
    return monge.load(controller="fixed")


def accepts(decoder, state, text):
    """Whether a text is one of the grammar, in the tokens in which the tokenizer writes it."""
    for token in decoder.encode(text):
        if (state := state.after(token)) is None:
            return False
    return state.after(min(decoder.eos_ids)) is not None


READ = {
    "line end behind optional blanks": (
        'root ::= (word "=" gap word "\\n")+\nword ::= [a-z]+ gap\ngap ::= [ \\t\\n]*\n',
        ["a=b\n", "a = b \n", "a=b\nc=d\n", "a=b\n\n"],
        ["a=b", "A=b\n", "=a\n"],
    ),
    "a class that is followed by itself": (
        'root ::= [a-z]+ [a-z0-9]* "x" [0-9]*',
        ["ax", "abx1", "a1x", "axx", "xxx99"],
        ["x", "1x", "a1", ""],
    ),
    "a text that begins another": (
        'root ::= ("a" "b" "c" | "ab" "d" | [a-c]+ "e")',
        ["abc", "abd", "abe", "cae"],
        ["ab", "abcd", "e"],
    ),
    "a name that begins as a keyword": (
        'root ::= ("if" " " name | name "=" [0-9]+)\nname ::= [a-z] [a-z0-9]*',
        ["if x", "if=1", "ifx=2", "if if"],
        ["if", "if ", "ifx"],
    ),
    "a string among others": (
        'root ::= item ("," item)*\nitem ::= "\\"" char* "\\"" | "true" | [0-9]+\n'
        'char ::= [^"\\\\] | "\\\\" (["\\\\rn] | "u" [0-9a-f]{4})',
        ['"true"', '"a\\"b",true,12', '"\\u00e9r"', '"é\\\\"', '""'],
        ['"a', '"\\x"', "true12", '"a"b"', '"\\u00"'],
    ),
    "a class in a loop beside what begins with it": (
        'root ::= ([ab] | "aac" | "(" root ")")* "."',
        ["ab.", "aac.", "aaac(b.)ba.", "."],
        ["ac.", "aac", "(a."],
    ),
    "two loops, one behind the other": (
        'root ::= loop loop "."\nloop ::= ([ab] | "x" "y")+',
        ["ab.", "aaxy.", "xyxy."],
        ["a.", "xy."],
    ),
    "counts that meet": ("root ::= [ab]{1,2} [b]{1,2} [a-c]{2,}", ["abab", "abbbcc"], ["abc"]),
    "left recursion": (
        'root ::= root "+" term | term\nterm ::= [0-9]',
        ["1", "1+2+3"],
        ["1+", "+"],
    ),
    "any character": ('root ::= "<" .{1,3} ">"', ["<a>", "<é世>", "<\n>", "<>>"], ["<>", "<abcd>"]),
    "escapes": (
        'root ::= "\\x22\\t" [\\x00-\\x1f] [^\\x20-\\x7E] "\\U0001F600" [\\u3041-\\u309F]',
        ['"\t\nÿ😀あ', '"\t\t\u2028😀ん'],
        ['"\t\n 😀あ', '"\t\nÿ😀a', "x\t\nÿ😀あ"],
    ),
    "a class across halves of pairs": ("root ::= [\\uD700-\\uFFFF]+", ["\ud7ff\ue000"], ["a"]),
    "marks in a class": ("root ::= [\\]\\[a^-]+ [^^]", ["[]a^-b", "--"], ["b", "\\a", "a^"]),
    "ranges of marks": ("root ::= [+--] [a-c-e]", ["+a", ",-", "-e"], [".a", "+d"]),
    "counts": (
        'root ::= "ab"{2} "b"{0,1} [0-9]{2,} ("x" | "y"){0,2} "z"{0}',
        ["abab12", "ababb123xy"],
        ["abb12", "ababbb12", "abab1", "abab12xyx", "abab12z"],
    ),
    "repetitions of repetitions": (
        'root ::= (("a"?)* "b")* ("" | "c"+)?',
        ["", "aab", "bcc"],
        ["a"],
    ),
    "empty alternatives": ('root ::= "a" gap "b"\ngap ::= | " " gap', ["ab", "a  b"], ["a\tb"]),
    "an empty text": ('root ::= ""', [""], ["a"]),
    "lines in groups, comments, rules in any order": (
        '# first\nw-1 ::= [a-z] # a letter\r\nroot ::=\n  ( # in a group\n  w-1 |\n  "#"\n  )+ "."',
        ["ab.", "#."],
        [".", "a", "# in."],
    ),
    "a rule of the name start": (
        'root ::= start\nstart ::= "Ab" | start-2\nstart-2 ::= "c"',
        ["Ab"],
        ["ab"],
    ),
}


@pytest.mark.parametrize(("rules", "texts", "others"), READ.values(), ids=READ)
def test_gbnf_accepts_the_texts_of_its_rules_alone(decoder, rules, texts, others):
    state = decoder.grammars.compile(Grammar.ebnf(rules))
    assert [text for text in texts if not accepts(decoder, state, text)] == []
    assert [text for text in others if accepts(decoder, state, text)] == []


REFUSED = {
    "root ::= foo": "line 1, column 10: the rule 'foo' is not defined",
    'a ::= "b"': "no rule is named `root`",
    'root ::= "a"\nroot ::= "b"': "line 2, column 1: the rule 'root' is defined twice",
    'root = "a"': "line 1, column 6: expected `::=` behind the name 'root'",
    'root ::= "a"\n  | "b"': "line 2, column 3: expected the name of a rule",
    'root ::= "a") "b"': "line 1, column 13: expected a text, a class",
    'root ::= ("a"\n': r"line 2, column 1: expected `\)` for the group of line 1, column 10",
    'root ::= "a': 'line 1, column 12: expected `"` for the text of line 1, column 10; got the end',
    "root ::= x\nx ::= [a-": "line 2, column 10: expected `]` for the class of line 2, column 7",
    "root ::= [a\\": "line 1, column 12: the escape",
    'root ::= "\\q"': "line 1, column 11: the escape",
    'root ::= "\\x1"': "line 1, column 11: `.x` takes 2 hexadecimal digits",
    'root ::= "\\uD83D\\uDE00"': "line 1, column 11: half of a pair",
    'root ::= "\\U00110000"': r"line 1, column 11: the last character is U\+10FFFF",
    "root ::= [z-a]": "line 1, column 11: the range ends before it begins",
    "root ::= []": "line 1, column 10: no character is in this class",
    "root ::= [^\\x00-\\U0010FFFF]": "line 1, column 10: no character is in this class",
    "root ::= *": "line 1, column 10: nothing stands before a repetition",
    'root ::= "a"{3,1}': "line 1, column 13: at least 3 and at most 1",
    'root ::= "a"{,1}': "line 1, column 14: expected a number of repetitions",
    'root ::= "a"{1;}': "line 1, column 15: expected `}` or `,`",
    "root ::= <think> .*": r"line 1, column 10: tokens \(`<...>`\) are not read",
    "root ::= !<[12]>": r"line 1, column 10: tokens \(`<...>`\) are not read",
    "root ::= " + "(" * 2000: "the groups or the rules nest too deeply",
}


@pytest.mark.parametrize(("rules", "message"), REFUSED.items(), ids=range(len(REFUSED)))
def test_bad_gbnf_is_refused_by_line_and_column(decoder, rules, message):
    with pytest.raises(OptionError, match=f"grammar: ebnf: {message}"):
        decoder.generate("a", grammar=Grammar.ebnf(rules))


def test_a_string_is_one_terminal():
    """Otherwise a mask of JSON takes fifty times as long."""
    rules = 'root ::= "\\"" char* "\\""\nchar ::= [^"\\\\] | "\\\\" ([rn] | "u" [0-9a-f]{4})'
    assert lark_of_gbnf(rules).count("]{1,}/") == 1


def test_a_text_that_a_rule_forces_is_drafted(decoder):
    state = decoder.grammars.compile(Grammar.ebnf('root ::= "the one and only" [a-z]'))
    assert decoder.tokenizer.decode(state.forced(20)).startswith("the one and")
