// Masses of laws that are known by scores, without writing a row of them: their sums over blocks of tokens, the sums of what a law has
// above another one, draws from either, and the tokens that top-k, top-p and min-p keep.
//
// All arithmetic is in float64. A result depends on the numbers alone: sums run over the lanes of a block, then over the blocks in order,
// whatever the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#if __has_include(<torch/csrc/stable/c/shim.h>)
#include <torch/csrc/stable/c/shim.h>
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

namespace {

constexpr int lanes = 8;
constexpr int64_t block = 1024;  // tokens
constexpr int64_t thread_blocks = (1 << 14) / block;  // that are worth a thread

typedef double Doubles __attribute__((vector_size(8 * lanes)));
typedef int64_t Longs __attribute__((vector_size(8 * lanes)));
typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));

enum Kind : int64_t { float32 = 0, bfloat16 = 1, masses = 2, float32_masses = 3 };

// A law: scores, of which masses are weight * e^((score - largest) * heat), or masses before the weight. With `token_ids`, of these
// tokens, in order.
struct Law {
  const void* numbers;
  const int64_t* token_ids;
  int64_t count, kind;
  double largest, heat, weight;
};

inline Doubles everywhere(double value) { return value - Doubles{}; }

template <typename Vector, typename From>
inline Vector read(const From* from) {
  Vector values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

// e^x for x <= 0 within a relative error of 1e-13, NaN for NaN, and 0 where the result is below the smallest normal number.
inline Doubles exponential(Doubles x) {
  const Doubles shift = everywhere(0x1.8p52), least = everywhere(-708.0);
  const Longs is_small = x < least;
  x = is_small ? least : x;
  const Doubles shifted = x * 0x1.71547652b82fep0 + shift;
  const Doubles r = x - (shifted - shift) * 0x1.62e42fefa39efp-1;
  // Chebyshev's approximation for |r| <= ln 2 / 2, within 3e-16.
  Doubles sum = everywhere(0x1.28a2ca617b969p-22);
  for (const double term : {0x1.72fafebdaf273p-19, 0x1.a019a6611cad5p-16, 0x1.a01978b8b3d18p-13, 0x1.6c16c17f46982p-10, 0x1.1111112ddae8bp-7,
                            0x1.55555555520a4p-5, 0x1.555555554b736p-3, 0x1.0000000000005p-1, 0x1.000000000001ep+0, 1.0})
    sum = sum * r + term;
  const Longs power = ((Longs)shifted << 52) + (int64_t{1023} << 52);
  return sum * (Doubles)(power & ~is_small);
}

inline Doubles scores_at(const Law& law, int64_t place) {
  if (law.kind == float32) return __builtin_convertvector(read<Floats>(static_cast<const float*>(law.numbers) + place), Doubles);
  const Words bits = __builtin_convertvector(read<Halves>(static_cast<const uint16_t*>(law.numbers) + place), Words) << 16;
  return __builtin_convertvector((Floats)bits, Doubles);
}

inline double score_at(const Law& law, int64_t place) {
  if (law.kind == float32) return static_cast<const float*>(law.numbers)[place];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(law.numbers)[place]} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Masses of `size` numbers from `first` on; what is written behind them is 0 up to a whole vector.
template <Kind kind>
void write_masses(const Law& law, int64_t first, int64_t size, double factor, double* out) {
  const double weight = law.weight * factor;
  int64_t i = 0;
  if constexpr (kind == masses) {
    for (; i < size; i++) out[i] = static_cast<const double*>(law.numbers)[first + i] * weight;
  } else if constexpr (kind == float32_masses) {
    for (; i < size; i++) out[i] = static_cast<const float*>(law.numbers)[first + i] * weight;
  } else {
    for (; i + lanes <= size; i += lanes) {
      const Doubles x = (scores_at(law, first + i) - law.largest) * law.heat;
      const Doubles values = exponential(x) * weight;
      std::memcpy(out + i, &values, sizeof values);
    }
    if (i < size) {
      Doubles x = everywhere(-1e9);
      for (int64_t j = i; j < size; j++) x[j - i] = (score_at(law, first + j) - law.largest) * law.heat;
      const Doubles values = exponential(x) * weight;
      std::memcpy(out + i, &values, sizeof values);
      return;
    }
  }
  for (; i % lanes; i++) out[i] = 0.0;
}

void write_numbers(const Law& law, int64_t first, int64_t size, double factor, double* out) {
  if (law.kind == float32)
    write_masses<float32>(law, first, size, factor, out);
  else if (law.kind == bfloat16)
    write_masses<bfloat16>(law, first, size, factor, out);
  else if (law.kind == masses)
    write_masses<masses>(law, first, size, factor, out);
  else
    write_masses<float32_masses>(law, first, size, factor, out);
}

// Masses of `size` tokens from `first` on, at most a block; zeros up to a whole vector.
void write_tokens(const Law& law, int64_t first, int64_t size, double factor, double* out) {
  if (!law.token_ids) return write_numbers(law, first, size, factor, out);
  std::fill(out, out + (size + lanes - 1) / lanes * lanes, 0.0);
  const int64_t* end = law.token_ids + law.count;
  const int64_t* from = std::lower_bound(law.token_ids, end, first);
  const int64_t* to = std::lower_bound(from, end, first + size);
  double numbers[block + lanes];
  write_numbers(law, from - law.token_ids, to - from, factor, numbers);
  for (const int64_t* at = from; at < to; at++) out[*at - first] = numbers[at - from];
}

// Masses of `size` tokens, at most a block, wherever they lie; 0 of those that the law does not name.
void write_some(const Law& law, const int64_t* tokens, int64_t size, double factor, double* out) {
  if (law.kind == float32 || law.kind == bfloat16) {
    float gathered[block];
    for (int64_t i = 0; i < size; i++) gathered[i] = score_at(law, tokens[i]);
    Law some = law;
    some.numbers = gathered, some.kind = float32;
    return write_numbers(some, 0, size, factor, out);
  }
  const double weight = law.weight * factor;
  const int64_t* end = law.token_ids + law.count;
  for (int64_t i = 0; i < size; i++) {
    int64_t place = tokens[i];
    if (law.token_ids) {
      const int64_t* at = std::lower_bound(law.token_ids, end, place);
      place = at < end && *at == place ? at - law.token_ids : -1;
    }
    const double number = place < 0              ? 0.0
                          : law.kind == masses ? static_cast<const double*>(law.numbers)[place]
                                               : static_cast<const float*>(law.numbers)[place];
    out[i] = number * weight;
  }
}

// The masses of a block of tokens: of p, or of what p has above q.
void write_block(const Law& p, const Law* q, double scale, int64_t first, int64_t size, double* out) {
  write_tokens(p, first, size, scale, out);
  if (!q) return;
  double taken[block + lanes];
  write_tokens(*q, first, size, 1.0, taken);
  for (int64_t i = 0; i < size; i += lanes) {
    Doubles left = read<Doubles>(out + i) - read<Doubles>(taken + i);
    left = left < 0.0 ? Doubles{} : left;  // NaN stays
    std::memcpy(out + i, &left, sizeof left);
  }
}

double sum_of(const double* values, int64_t size) {
  Doubles sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= size; i += 4 * lanes)
    for (int part = 0; part < 4; part++) sums[part] += read<Doubles>(values + i + part * lanes);
  for (; i < size; i += lanes) sums[0] += read<Doubles>(values + i);
  Doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) sum[lane] += sum[lane + width];
  return sum[0];
}

struct Sums {
  const Law& p;
  const Law* q;
  double scale;
  int64_t vocab;
  double* blocks;
};

void add_blocks(int64_t begin, int64_t end, void* context) {
  const Sums& all = *static_cast<const Sums*>(context);
  double values[block + lanes];
  for (int64_t at = begin; at < end; at++) {
    const int64_t first = at * block, size = std::min(block, all.vocab - first);
    write_block(all.p, all.q, all.scale, first, size, values);
    all.blocks[at] = sum_of(values, size);
  }
}

void in_parallel(int64_t count, void (*work)(int64_t, int64_t, void*), void* context) {
#if defined(TORCH_VERSION_2_10_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
  if (count >= 2 * thread_blocks) {
    torch_parallel_for(0, count, thread_blocks, work, context);
    return;
  }
#endif
  work(0, count, context);
}

int64_t blocks_of(int64_t vocab) { return (vocab + block - 1) / block; }

double total_of(const double* blocks, int64_t count) {
  double sum = 0.0;
  for (int64_t at = 0; at < count; at++) sum += blocks[at];
  return sum;
}

float top_of(const Law& law, int64_t first, int64_t size) {
  int64_t i = 0;
  float most = -INFINITY;
  if (law.kind == float32) {
    const float* from = static_cast<const float*>(law.numbers) + first;
    Floats tops[4];
    for (auto& top : tops) top = -INFINITY - Floats{};
    for (; i + 4 * lanes <= size; i += 4 * lanes)
      for (int part = 0; part < 4; part++) {
        const Floats value = read<Floats>(from + i + part * lanes);
        tops[part] = value > tops[part] ? value : tops[part];
      }
    for (const auto& top : tops)
      for (int lane = 0; lane < lanes; lane++) most = top[lane] > most ? top[lane] : most;
  }
  for (; i < size; i++) {
    const float value = score_at(law, first + i);
    most = value > most ? value : most;
  }
  return most;
}

// Rows of one length.
struct Rows {
  Law* laws;
  int64_t num_blocks;
  double *blocks, *tops;
};

void find_tops(int64_t begin, int64_t end, void* context) {
  const Rows& rows = *static_cast<const Rows*>(context);
  for (int64_t at = begin; at < end; at++) {
    const Law& law = rows.laws[at / rows.num_blocks];
    const int64_t first = at % rows.num_blocks * block;
    rows.tops[at] = top_of(law, first, std::min(block, law.count - first));
  }
}

void add_rows(int64_t begin, int64_t end, void* context) {
  const Rows& rows = *static_cast<const Rows*>(context);
  double values[block + lanes];
  for (int64_t at = begin; at < end; at++) {
    const Law& law = rows.laws[at / rows.num_blocks];
    const int64_t first = at % rows.num_blocks * block, size = std::min(block, law.count - first);
    write_numbers(law, first, size, 1.0, values);
    rows.blocks[at] = sum_of(values, size);
  }
}

// A token that rules may keep.
struct Candidate {
  float score;
  int32_t token;
  double mass;
};

// In order of mass, and of tokens among equal ones.
inline bool before(const Candidate& a, const Candidate& b) { return a.score > b.score || (a.score == b.score && a.token < b.token); }

constexpr int64_t run = 64;  // tokens
constexpr double mass_error = 1e-12;  // relative, which masses stay below: see `exponential`

// Calls `visit(first, end)` for runs of tokens of which one at least has this score, which `visit` may raise.
template <typename Visit>
void visit_runs(const Law& law, const double* tops, const float& least, Visit visit) {
  for (int64_t at = 0; at < blocks_of(law.count); at++) {
    if (tops[at] < least) continue;
    const int64_t end = std::min((at + 1) * block, law.count);
    for (int64_t first = at * block; first < end; first += run) {
      const int64_t size = std::min(run, end - first);
      if (top_of(law, first, size) >= least) visit(first, first + size);
    }
  }
}

// Tokens with at least this score, in order, without masses.
void collect(const Law& law, const double* tops, float least, std::vector<Candidate>& found) {
  visit_runs(law, tops, least, [&](int64_t first, int64_t end) {
    size_t size = found.size();
    found.resize(size + end - first);
    for (int64_t i = first; i < end; i++) {
      const float score = score_at(law, i);
      found[size] = {score, static_cast<int32_t>(i), 0.0};
      size += score >= least;
    }
    found.resize(size);
  });
}

// The `count`-th largest score.
float top_score(const Law& law, const double* tops, int64_t count) {
  thread_local std::vector<float> scores;
  scores.clear();
  float least = -INFINITY;
  const auto shorten = [&] {
    std::nth_element(scores.begin(), scores.begin() + (count - 1), scores.end(), std::greater<float>());
    scores.resize(count);
    least = scores[count - 1];
  };
  if (count <= law.count / run) {  // as many tokens as runs have at least the top of their run
    for (int64_t first = 0; first < law.count; first += run) scores.push_back(top_of(law, first, std::min(run, law.count - first)));
    shorten();
  }
  scores.clear();
  visit_runs(law, tops, least, [&](int64_t first, int64_t end) {
    for (int64_t i = first; i < end; i++) {
      const float score = score_at(law, i);
      if (score >= least) scores.push_back(score);
    }
    if (scores.size() >= static_cast<size_t>(2 * count + 64)) shorten();
  });
  shorten();
  return least;
}

double add_masses(const Law& law, std::vector<Candidate>& some) {
  thread_local std::vector<float> scores;
  double values[block + lanes], total = 0.0;
  scores.resize(block);
  Law part = law;
  part.numbers = scores.data(), part.kind = float32;
  for (size_t first = 0; first < some.size(); first += block) {
    const size_t size = std::min<size_t>(block, some.size() - first);
    for (size_t i = 0; i < size; i++) scores[i] = some[first + i].score;
    write_numbers(part, 0, size, 1.0, values);
    for (size_t i = 0; i < size; i++) some[first + i].mass = values[i];
    total += sum_of(values, size);
  }
  return total;
}

// Leaves the tokens before which the sum of masses is below `wanted`; false where the rounding of a sum could decide.
bool keep_most_probable(std::vector<Candidate>& some, double wanted, double rounding) {
  constexpr int most_buckets = 1024;
  constexpr size_t few = 256;
  std::vector<Candidate> part, next;
  const std::vector<Candidate>* at = &some;
  double above = 0.0;
  for (;;) {
    float low = INFINITY, high = -INFINITY;
    for (const auto& one : *at) low = std::min(low, one.score), high = std::max(high, one.score);
    if (at->size() <= few || !(low < high)) break;
    // Buckets of scores, from the highest down. Only those of one bucket are sorted.
    const float width = (most_buckets - 1) / (high - low);
    if (!(width > 0.0f && std::isfinite(width))) break;
    const auto bucket_of = [&](float score) { return static_cast<int>((high - score) * width); };
    double sums[most_buckets] = {};
    for (const auto& one : *at) sums[bucket_of(one.score)] += one.mass;
    int bucket = 0;
    while (bucket + 1 < most_buckets && above + sums[bucket] < wanted) above += sums[bucket++];
    if (std::abs(above - wanted) <= rounding || std::abs(above + sums[bucket] - wanted) <= rounding) return false;
    next.clear();
    for (const auto& one : *at)
      if (bucket_of(one.score) == bucket) next.push_back(one);
    if (next.empty()) return false;
    const bool is_stuck = next.size() == at->size();
    part.swap(next), at = &part;
    if (is_stuck) break;
  }
  if (at != &part) part = some;
  std::sort(part.begin(), part.end(), before);
  size_t count = 0;
  while (count < part.size() && above < wanted) {
    above += part[count++].mass;
    if (std::abs(above - wanted) <= rounding) return false;
  }
  if (count == 0) return false;
  const Candidate last = part[count - 1];
  some.erase(std::remove_if(some.begin(), some.end(), [&](const Candidate& one) { return before(last, one); }), some.end());
  return true;
}

thread_local std::vector<Candidate> selected;

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Sets `weight` of laws of one kind, as many numbers each, so that masses sum to 1, and writes the sums of blocks; of scores also
// `largest`, and the largest scores of blocks. The weight of a law is NaN, infinite or 0 where its numbers make none.
EXPORTED void monge_scan(Law* laws, int64_t num_laws, double* blocks, double* tops) {
  const int64_t count = blocks_of(laws->count);
  Rows rows{laws, count, blocks, tops};
  if (tops) in_parallel(num_laws * count, find_tops, &rows);
  for (int64_t row = 0; row < num_laws; row++) {
    if (tops) laws[row].largest = *std::max_element(tops + row * count, tops + (row + 1) * count);
    // Infinite ones give NaN for every mass.
    laws[row].weight = 1.0;
  }
  in_parallel(num_laws * count, add_rows, &rows);
  for (int64_t row = 0; row < num_laws; row++) {
    double* sums = blocks + row * count;
    laws[row].weight = 1.0 / total_of(sums, count);
    for (int64_t at = 0; at < count; at++) sums[at] *= laws[row].weight;
  }
}

// Writes the masses of all tokens, or of `scale` p - q where it is positive.
EXPORTED void monge_masses(const Law* p, const Law* q, double scale, int64_t vocab, double* out) {
  struct All { const Law &p; const Law* q; double scale; int64_t vocab; double* out; } all{*p, q, scale, vocab, out};
  in_parallel(blocks_of(vocab), [](int64_t begin, int64_t end, void* context) {
    const All& all = *static_cast<const All*>(context);
    double values[block + lanes];
    for (int64_t at = begin; at < end; at++) {
      const int64_t first = at * block, size = std::min(block, all.vocab - first);
      write_block(all.p, all.q, all.scale, first, size, values);
      std::memcpy(all.out + first, values, size * sizeof(double));
    }
  }, &all);
}

// Writes the masses of some tokens, of p or of what `scale` p has above q.
EXPORTED void monge_at(const Law* p, const Law* q, double scale, const int64_t* tokens, int64_t count, double* out) {
  double left[block + lanes], taken[block + lanes];
  for (int64_t first = 0; first < count; first += block) {
    const int64_t size = std::min(block, count - first);
    write_some(*p, tokens + first, size, scale, left);
    if (q) write_some(*q, tokens + first, size, 1.0, taken);
    for (int64_t i = 0; i < size; i++) out[first + i] = q ? std::max(left[i] - taken[i], 0.0) : left[i];
  }
}

// Writes the sums over blocks of what `scale` p has above q, and returns their sum.
EXPORTED double monge_excess(const Law* p, const Law* q, double scale, int64_t vocab, const double* p_blocks, double* blocks) {
  const int64_t count = blocks_of(vocab);
  if (p_blocks && q->token_ids && !p->token_ids && 4 * q->count < vocab) {
    // What q takes of p is missing from its sums.
    for (int64_t at = 0; at < count; at++) blocks[at] = p_blocks[at] * scale;
    double left[block + lanes], taken[block + lanes];
    for (int64_t first = 0; first < q->count; first += block) {
      const int64_t size = std::min(block, q->count - first);
      write_some(*p, q->token_ids + first, size, scale, left);
      write_numbers(*q, first, size, 1.0, taken);
      for (int64_t i = 0; i < size; i++) taken[i] = std::min(left[i], taken[i]);
      for (int64_t i = 0; i < size;) {
        const int64_t at = q->token_ids[first + i] / block;
        double sum = 0.0;
        for (; i < size && q->token_ids[first + i] < (at + 1) * block; i++) sum += taken[i];
        blocks[at] -= sum;
      }
    }
    for (int64_t at = 0; at < count; at++) blocks[at] = std::max(blocks[at], 0.0);
  } else {
    Sums sums{*p, q, scale, vocab, blocks};
    in_parallel(count, add_blocks, &sums);
  }
  return total_of(blocks, count);
}

// The token whose interval covers `position` of the sum of the masses of p, or of what `scale` p has above q; never one of mass zero.
EXPORTED int64_t monge_quantile(const Law* p, const Law* q, double scale, int64_t vocab, const double* blocks, double position) {
  const int64_t count = blocks_of(vocab);
  const double wanted = position * total_of(blocks, count);
  double values[block + lanes], sum = 0.0;
  int64_t found = -1;
  for (int64_t at = 0; at < count; at++) {
    const double next = sum + blocks[at];
    // Where rounding alone leaves nothing of a block, it ends behind its last token.
    if (next > wanted || at == count - 1) {
      const int64_t first = at * block, size = std::min(block, vocab - first);
      write_block(*p, q, scale, first, size, values);
      for (int64_t i = 0; i < size; i++) {
        if (values[i] > 0.0) {
          found = first + i;
          if ((sum += values[i]) > wanted) return found;
        }
      }
      if (found >= 0) return found;
    }
    sum = next;
  }
  // Rounding brought the search behind the last mass.
  for (int64_t at = count - 1; at >= 0; at--) {
    const int64_t first = at * block, size = std::min(block, vocab - first);
    write_block(*p, q, scale, first, size, values);
    for (int64_t i = size - 1; i >= 0; i--)
      if (values[i] > 0.0) return first + i;
  }
  return -1;
}

// Finds the tokens that top-k (if positive), top-p and min-p keep, one after the other, of a law whose blocks were scanned. Returns their
// number, or -1 where the rounding of a sum could decide.
EXPORTED int64_t monge_select(const Law* law, const double* tops, int64_t top_k, double top_p, double min_p) {
  const double rounding = 10 * (law->count + 8) * 0x1p-53;
  double total = 0.0;
  const auto select = [&](float least) {
    selected.clear();
    collect(*law, tops, std::max(least, std::numeric_limits<float>::lowest()), selected);  // -inf has no mass
    total = add_masses(*law, selected);
  };
  const auto score_of = [&](double mass) {  // or one a little smaller
    return std::nextafter(static_cast<float>(law->largest + std::log(mass / law->weight) / law->heat), -INFINITY);
  };
  const bool has_top_k = top_k > 0 && top_k < law->count;
  if (has_top_k) {
    select(top_score(*law, tops, top_k));
  } else if (top_p < 1.0) {
    // Where the tokens of at least a mass have more than top-p together, it keeps no other. Those of the last mass have: what they leave
    // out is less than half of what top-p leaves out.
    for (const double mass : {1e-3, 1e-5, (1.0 - top_p) / (2 * law->count)}) {
      select(score_of(mass));
      if (total > top_p + rounding) break;
    }
    total = 1.0;
  } else {
    select(score_of(0.5 * min_p * law->weight));
  }
  if (top_p < 1.0 && !keep_most_probable(selected, top_p * total, rounding * total)) return -1;
  const double least = min_p * law->weight;
  for (const auto& one : selected)
    if (min_p > 0.0 && std::abs(one.mass - least) <= mass_error * least) return -1;
  selected.erase(std::remove_if(selected.begin(), selected.end(), [&](const Candidate& one) { return !(one.mass > 0.0) || one.mass < least; }),
                 selected.end());
  return selected.size();
}

// Writes what `monge_select` found on this thread, with masses that sum to 1.
EXPORTED void monge_selected(int64_t* token_ids, double* probs) {
  double total = 0.0;
  for (const auto& one : selected) total += one.mass;
  for (size_t i = 0; i < selected.size(); i++) token_ids[i] = selected[i].token, probs[i] = selected[i].mass / total;
}

// Writes the places of numbers of at least 0 in increasing order, equal ones in their own: a radix sort, in time linear in their count.
EXPORTED void monge_order(const double* numbers, int64_t count, int64_t* order) {
  constexpr int digit = 11, passes = 6;
  constexpr uint64_t size = 1 << digit;
  struct Entry { uint64_t key; int64_t place; };
  std::vector<Entry> from(count), to(count);
  std::vector<int64_t> counts(passes * size);
  for (int64_t place = 0; place < count; place++) {
    uint64_t key;
    std::memcpy(&key, numbers + place, sizeof key);
    from[place] = {key, place};
    for (int pass = 0; pass < passes; pass++) counts[pass * size + (key >> pass * digit) % size]++;
  }
  for (int pass = 0; pass < passes && count; pass++) {
    int64_t* ends = counts.data() + pass * size;
    const auto digit_of = [&](const Entry& entry) { return (entry.key >> pass * digit) % size; };
    if (ends[digit_of(from[0])] == count) continue;
    int64_t start = 0;
    for (uint64_t value = 0; value < size; value++) start += std::exchange(ends[value], start);
    for (const Entry& entry : from) to[ends[digit_of(entry)]++] = entry;
    from.swap(to);
  }
  for (int64_t rank = 0; rank < count; rank++) order[rank] = from[rank].place;
}
