// Products of a few rows with a matrix in panels: every number of the matrix is fetched once for all rows.
//
// A panel is 32 columns. Its lines, one for every number of a row that is multiplied, lie one behind another. A line of bfloat16
// numbers is 16 words, column j in the lower half of word j and column 16 + j in the upper; one of float16 or float32 is 32 numbers.
// A sum is taken in the order of the lines, whatever the number of rows: a row's result does not depend on its neighbours.
//
// Panels of integers come in groups of numbers of a row: 64 numbers of 8 bits with a line of bfloat16 scales, then 16 lines of 32
// columns with four numbers each, stored as number + 128; or blocks of groups, see `block_panels.py`. Rows are rounded to 8 bits in
// groups of the same size, with one scale a group; a group's products are summed in integers.

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BW__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if __has_include(<torch/csrc/stable/c/shim.h>)
#include <torch/csrc/stable/c/shim.h>
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

#include "released_lock.h"

namespace {

// The sums of so many rows, for one group of lanes, fit into the registers together with what they are made of.
#ifdef __AVX512F__
constexpr int lanes = 16, most_rows = 12;
#else
constexpr int lanes = 8, most_rows = 6;
#endif
constexpr int words = 16, groups = words / lanes;
constexpr int64_t chunk = 4096;  // bytes of a panel that all groups use before the next ones are needed: they stay close by
// Products and bytes that are worth a thread: fewer are done before another thread has started. One row is bound by the bytes.
constexpr int64_t thread_products = 1 << 20, thread_bytes = 1 << 19;

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));

struct Bfloat16 {
  static constexpr int64_t bytes = 4 * words;
  static void load(const char* line, int group, Floats& first, Floats& second) {
    Words both;
    std::memcpy(&both, line + sizeof both * group, sizeof both);
    first = (Floats)(both << 16);
    second = (Floats)(both & 0xffff0000u);
  }
};

// float16 numbers of one group of lanes, all finite.
inline Floats half_floats(const char* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words bits = __builtin_convertvector(halves, Words);
  const Floats size = (Floats)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponents' biases are 112 apart
  return (Floats)((Words)size | (bits & 0x8000u) << 16);
#endif
}

// 32 numbers of 2 bytes; a line of them is named by `name`, since one of bfloat16 numbers has as many bytes.
struct Float16 {
  static constexpr int64_t bytes = 4 * words, name = 2;
  static void load(const char* line, int group, Floats& first, Floats& second) {
    first = half_floats(line + 2 * lanes * group);
    second = half_floats(line + 2 * words + 2 * lanes * group);
  }
};

struct Float32 {
  static constexpr int64_t bytes = 8 * words;
  static void load(const char* line, int group, Floats& first, Floats& second) {
    std::memcpy(&first, line + sizeof first * group, sizeof first);
    std::memcpy(&second, line + 4 * words + sizeof second * group, sizeof second);
  }
};

// One of the matrices that rows are multiplied with; results of a row are `stride` apart.
struct Product {
  const float* rows;
  const char* panels;
  float* out;
  int64_t num_rows, depth, width, stride;
  int64_t num_panels() const { return (width + 2 * words - 1) / (2 * words); }
};

// Adds the products of `count` lines to the sums of R rows, for G groups of lanes from `group` on. The next chunk is asked for
// meanwhile, each group its part of it. Not inlined: the compiler would then keep sums in memory.
template <typename Kind, int R, int G>
[[gnu::noinline]] void add(const float* rows, int64_t stride, const char* line, int64_t count, int group, Floats* kept) {
  Floats sums[R][2 * G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < 2 * G; g++) sums[r][g] = kept[r * 2 * G + g];
  const char* ahead = line + chunk + group * (chunk / groups);
  for (int64_t k = 0; k < count; k++, line += Kind::bytes, ahead += Kind::bytes / groups * G) {
    __builtin_prefetch(ahead);
    for (int g = 0; g < G; g++) {
      Floats first, second;
      Kind::load(line, group + g, first, second);
      for (int r = 0; r < R; r++) {
        const Floats factor = rows[r * stride + k] - Floats{};  // in every lane; adding zero would lose the sign of zero
        sums[r][2 * g] += factor * first;
        sums[r][2 * g + 1] += factor * second;
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int g = 0; g < 2 * G; g++) kept[r * 2 * G + g] = sums[r][g];
}

// R rows with one panel; fewer than R where there are fewer.
template <typename Kind, int R>
void multiply(const Product& all, int64_t row, int64_t num_rows, int64_t panel) {
  if constexpr (R > 1) {
    if (num_rows < R) return multiply<Kind, R - 1>(all, row, num_rows, panel);
  }
  constexpr int together = groups * R <= 4 ? groups : 1;
  constexpr int64_t lines = chunk / Kind::bytes;
  Floats sums[groups / together][R][2 * together] = {};
  for (int64_t k = 0; k < all.depth; k += lines) {
    const char* line = all.panels + (panel * all.depth + k) * Kind::bytes;
    const int64_t count = all.depth - k < lines ? all.depth - k : lines;
    for (int group = 0; group < groups; group += together)
      add<Kind, R, together>(all.rows + row * all.depth + k, all.depth, line, count, group, sums[group / together][0]);
  }
  for (int r = 0; r < R; r++)
    for (int part = 0; part < 2 * groups; part++) {
      const int group = part / 2, half = part % 2;
      const int64_t column = (panel * 2 + half) * words + group * lanes, left = all.width - column;
      const Floats& sum = sums[group / together][r][2 * (group % together) + half];
      if (left > 0) std::memcpy(all.out + (row + r) * all.stride + column, &sum, 4 * (left < lanes ? left : lanes));
    }
}

template <typename Kind>
void multiply_panel(const Product& all, int64_t panel) {
  const int64_t blocks = (all.num_rows + most_rows - 1) / most_rows;  // of rows, about equally large
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t row = all.num_rows * block / blocks;
    multiply<Kind, most_rows>(all, row, all.num_rows * (block + 1) / blocks - row, panel);
  }
}

// What one group of lanes needs of a block: the scales and bases of both halves of its columns.
struct Factors {
  Floats scales[2], bases[2];
};

// How a panel stores the groups of a row; the last block is filled with zeros. `parts` are the quads of numbers in a word, `zero` is
// what a number 0 is stored as.
struct Eight {
  static constexpr int64_t group_size = 64, quads = group_size / 4, parts = 1, num_groups = 1, zero = 128;
  static constexpr int64_t head = 4 * words, factor_bytes = 0, group_bytes = 2 * words * group_size, bytes = head + group_bytes;
  static constexpr bool has_base = false;
  static Words part(const Words& line, int) { return line; }
  static void load(const char* block, int lane_group, Factors& to) { Bfloat16::load(block, lane_group, to.scales[0], to.scales[1]); }
};

template <int bits, int64_t size, int64_t count, bool with_base>
struct Block {
  static constexpr int64_t group_size = size, quads = size / 4, parts = 8 / bits, num_groups = count;
  static constexpr bool has_base = with_base;
  static constexpr int64_t zero = has_base ? 0 : 1 << (bits - 1), factors = has_base ? 2 : 1;
  static constexpr int64_t head = 4 * words * factors, factor_bytes = count > 1 ? 2 * words * factors : 0;
  static constexpr int64_t group_bytes = factor_bytes + 2 * words * size * bits / 8, bytes = head + count * group_bytes;
  static Words part(const Words& line, int which) { return bits == 8 ? line : (which ? line >> 4 : line) & 0x0f0f0f0fu; }
  static void load(const char* block, int lane_group, Factors& to) {
    for (int half = 0; half < 2; half++) {
      const char* from = block + 2 * (half * words + lane_group * lanes);
      to.scales[half] = half_floats(from);
      if constexpr (has_base) to.bases[half] = half_floats(from + 4 * words);
    }
  }
};

// The numbers of one group of lanes, which are integers of 8 bits.
inline Floats byte_floats(const char* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  Floats floats;
#if defined(__AVX2__)
  for (int lane = 0; lane < lanes; lane += 8) {
    const __m256 some = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + lane))));
    std::memcpy(reinterpret_cast<char*>(&floats) + 4 * lane, &some, sizeof some);
  }
#else
  for (int lane = 0; lane < lanes; lane++) floats[lane] = static_cast<signed char>(from[lane]);
#endif
  return floats;
#endif
}

constexpr int most_rounded_rows = lanes == 16 ? 8 : 4;

// Rows that are multiplied together are a block. A block's numbers lie quad by quad, its scales and starts group by group, those of
// all of its rows side by side.
struct RoundedRows {
  const int32_t* numbers;  // four to a word
  const float* scales;
  const int32_t* starts;  // without bases: what products begin with, as the matrix stores number + zero: -zero times the sum of a group
  const float* totals;    // with bases: the sum of a group times its scale
  int64_t num_rows, num_groups;
  int64_t num_blocks() const { return (num_rows + most_rounded_rows - 1) / most_rounded_rows; }
  int64_t first_row(int64_t block) const { return num_rows * block / num_blocks(); }
};

// A group's numbers divided by their scale, to the nearest integer, ties to even; the scale is the largest of them / 127. A group
// whose largest number is too small for 127 / largest to be finite counts as zeros.
template <int64_t size>
struct RoundedGroup {
  alignas(64) int8_t numbers[size];
  float scale;
  int32_t sum;

  static float inverse_of(float largest) { return largest > 127.0f / FLT_MAX ? 127.0f / largest : 0.0f; }

  // NaN and infinity reach the result by the scale; their own integers are 0.
  void round(const float* from) {
#if defined(__AVX512F__)
    constexpr int parts = size / 16;
    __m512 values[parts], sizes = _mm512_setzero_ps();
    for (int part = 0; part < parts; part++) {
      values[part] = _mm512_loadu_ps(from + 16 * part);
      sizes = _mm512_max_ps(_mm512_abs_ps(values[part]), sizes);
    }
    const float largest = _mm512_reduce_max_ps(sizes);
    const __m512 inverse = _mm512_set1_ps(inverse_of(largest));
    __m512i sums = _mm512_setzero_si512();
    float wrong = 0.0f;
    for (int part = 0; part < parts; part++) {
      const __m512 scaled = _mm512_mul_ps(values[part], inverse);
      const __m512i rounded = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(scaled, scaled, _CMP_ORD_Q), scaled);
      sums = _mm512_add_epi32(sums, rounded);
      _mm_store_si128(reinterpret_cast<__m128i*>(numbers + 16 * part), _mm512_cvtepi32_epi8(rounded));
      if (_mm512_cmp_ps_mask(values[part], values[part], _CMP_UNORD_Q)) wrong = NAN;
    }
    scale = largest / 127.0f + wrong;
    sum = _mm512_reduce_add_epi32(sums);
#else
    float largest = 0.0f, wrong = 0.0f;
    for (int64_t k = 0; k < size; k++) {
      const float absolute = std::fabs(from[k]);
      largest = absolute > largest ? absolute : largest;
      if (absolute != absolute) wrong = NAN;
    }
    const float inverse = inverse_of(largest);
    sum = 0;
    for (int64_t k = 0; k < size; k++) {
      const float number = std::nearbyint(from[k] * inverse);
      numbers[k] = number == number ? (int8_t)number : 0;
      sum += numbers[k];
    }
    scale = largest / 127.0f + wrong;
#endif
  }
};

// Adds to every lane the products of four numbers of the matrix and four of a row. A template, so that only the branch for the
// size of the lanes has to make sense.
template <typename Sum, typename Matrix>
inline Sum dot(Sum sum, Matrix matrix, int32_t row) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  if constexpr (sizeof(Sum) == 64) return (Sum)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)matrix, _mm512_set1_epi32(row));
#elif defined(__AVX512BW__) && defined(__AVX512F__)
  if constexpr (sizeof(Sum) == 64) {
    const __m512i numbers = _mm512_set1_epi32(row), bytes = (__m512i)matrix;
    const __m512i even =
        _mm512_madd_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(255)), _mm512_srai_epi16(_mm512_slli_epi16(numbers, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(bytes, 8), _mm512_srai_epi16(numbers, 8));
    return (Sum)_mm512_add_epi32((__m512i)sum, _mm512_add_epi32(even, odd));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(Sum) == 32) {
    const __m256i numbers = _mm256_set1_epi32(row), bytes = (__m256i)matrix;
#ifdef __AVXVNNI__
    return (Sum)_mm256_dpbusd_avx_epi32((__m256i)sum, bytes, numbers);
#else
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(numbers, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(numbers, 8));
    return (Sum)_mm256_add_epi32((__m256i)sum, _mm256_add_epi32(even, odd));
#endif
  }
#endif
  for (int shift = 0; shift < 32; shift += 8) sum += (Sum)(matrix >> shift & 255u) * (int32_t)(int8_t)(uint32_t(row) >> shift);
  return sum;
}

struct RoundedProduct {
  const RoundedRows* rows;
  const Product* matrix;
  int64_t num_panels() const { return matrix->num_panels(); }
};

// A block of R rows with one panel, for one group of lanes of both halves of its columns.
template <typename Kind, int R>
[[gnu::noinline]] void multiply_rounded_lanes(const RoundedProduct& all, int64_t row, int64_t panel, int lane_group) {
  const RoundedRows& rows = *all.rows;
  const char* from = all.matrix->panels + panel * (rows.num_groups / Kind::num_groups) * Kind::bytes;
  const int32_t* numbers = rows.numbers + row * rows.num_groups * Kind::quads;
  int64_t place = row * rows.num_groups;
  Factors of_block;
  Floats sums[R][2] = {};
  for (int64_t group = 0; group < rows.num_groups; group++, from += Kind::group_bytes, place += R) {
    const char* block = from;
    if (group % Kind::num_groups == 0) {
      if constexpr (Kind::num_groups > 1) Kind::load(block, lane_group, of_block);
      from += Kind::head;
    }
    Ints products[R][2];
    for (int r = 0; r < R; r++) products[r][0] = products[r][1] = Kind::has_base ? Ints{} : rows.starts[place + r] - Ints{};
    const char* line = from + Kind::factor_bytes + 4 * lanes * lane_group;
    for (int64_t quad = 0; quad < Kind::quads; quad += Kind::parts, line += 8 * words) {
      Words first, second;
      std::memcpy(&first, line, sizeof first);
      std::memcpy(&second, line + 4 * words, sizeof second);
      __builtin_prefetch(line + chunk);
      __builtin_prefetch(line + chunk + 4 * words);
      for (int part = 0; part < Kind::parts; part++, numbers += R) {
        const Words lower = Kind::part(first, part), upper = Kind::part(second, part);
        for (int r = 0; r < R; r++) {
          products[r][0] = dot(products[r][0], lower, numbers[r]);
          products[r][1] = dot(products[r][1], upper, numbers[r]);
        }
      }
    }
    Factors factors = of_block;
    // Only now where a group has its own: registers hold products of many rows until then.
    if constexpr (Kind::num_groups == 1)
      Kind::load(block, lane_group, factors);
    else
      for (int half = 0; half < 2; half++) {
        const char* bytes = from + half * words + lane_group * lanes;
        factors.scales[half] *= byte_floats(bytes);
        if constexpr (Kind::has_base) factors.bases[half] *= byte_floats(bytes + 2 * words);
      }
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) {
        sums[r][half] += __builtin_convertvector(products[r][half], Floats) * (factors.scales[half] * rows.scales[place + r]);
        if constexpr (Kind::has_base) sums[r][half] += factors.bases[half] * rows.totals[place + r];
      }
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) {
      const int64_t column = (panel * 2 + half) * words + lane_group * lanes, left = all.matrix->width - column;
      if (left > 0)
        std::memcpy(all.matrix->out + (row + r) * all.matrix->stride + column, &sums[r][half], 4 * (left < lanes ? left : lanes));
    }
}

template <typename Kind, int R>
void multiply_rounded(const RoundedProduct& all, int64_t row, int64_t num_rows, int64_t panel) {
  if constexpr (R > 1) {
    if (num_rows < R) return multiply_rounded<Kind, R - 1>(all, row, num_rows, panel);
  }
  for (int lane_group = 0; lane_group < groups; lane_group++) multiply_rounded_lanes<Kind, R>(all, row, panel, lane_group);
}

template <typename Kind>
void multiply_rounded_panel(const RoundedProduct& all, int64_t panel) {
  const RoundedRows& rows = *all.rows;
  for (int64_t block = 0; block < rows.num_blocks(); block++) {
    const int64_t row = rows.first_row(block);
    multiply_rounded<Kind, most_rounded_rows>(all, row, rows.first_row(block + 1) - row, panel);
  }
}

// The panels of several products, one product behind another, between the threads. `products` and `bytes` are those of a panel.
template <typename One, void (*multiply_one)(const One&, int64_t)>
AOTITorchError run_panels(const std::vector<One>& all, int64_t products, int64_t bytes) {
  int64_t panels = 0;
  for (const One& one : all) panels += one.num_panels();
  const auto work = [](int64_t begin, int64_t end, void* context) {
    int64_t first = 0;  // of a product
    for (const One& one : *static_cast<const std::vector<One>*>(context)) {
      const int64_t behind = first + one.num_panels();
      for (int64_t panel = begin > first ? begin : first; panel < end && panel < behind; panel++) multiply_one(one, panel - first);
      first = behind;
    }
  };
  void* context = const_cast<std::vector<One>*>(&all);
#if defined(TORCH_VERSION_2_10_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
  const int64_t by_products = thread_products / (products + 1) + 1, by_bytes = thread_bytes / (bytes + 1) + 1;
  const int64_t grain = by_products < by_bytes ? by_products : by_bytes;
  return torch_parallel_for(0, panels, grain, work, context);
#else
  work(0, panels, context);
  return AOTI_TORCH_SUCCESS;
#endif
}

template <typename Kind>
AOTITorchError multiply_all(const std::vector<Product>& all) {
  const Product& any = all.front();
  // None where there is nothing to sum.
  return run_panels<Product, multiply_panel<Kind>>(all, 2 * words * any.depth * any.num_rows, any.depth * Kind::bytes);
}

template <typename Kind>
AOTITorchError multiply_all_rounded(const std::vector<Product>& all) {
  constexpr int64_t group_size = Kind::group_size, quads = Kind::quads;
  const float* from_rows = all.front().rows;
  const int64_t num_rows = all.front().num_rows, depth = all.front().depth;
  constexpr int64_t block_size = group_size * Kind::num_groups;
  const int64_t num_groups = (depth + block_size - 1) / block_size * Kind::num_groups, places = num_rows * num_groups;
  thread_local std::vector<int32_t> numbers, starts;
  thread_local std::vector<float> scales, totals;
  numbers.resize(places * quads), starts.resize(places), scales.resize(places), totals.resize(places);
  const RoundedRows rows{numbers.data(), scales.data(), starts.data(), totals.data(), num_rows, num_groups};
  for (int64_t block = 0; block < rows.num_blocks(); block++) {
    const int64_t first = rows.first_row(block), count = rows.first_row(block + 1) - first;
    for (int64_t r = 0; r < count; r++)
      for (int64_t group = 0; group < num_groups; group++) {
        const float* from = from_rows + (first + r) * depth + group * group_size;
        const int64_t left = depth - group * group_size;
        alignas(64) float filled[group_size] = {};
        if (left < group_size) from = left > 0 ? static_cast<float*>(std::memcpy(filled, from, 4 * left)) : filled;
        RoundedGroup<group_size> one;
        one.round(from);
        const int64_t place = (first * num_groups + group * count) + r;
        for (int64_t quad = 0; quad < quads; quad++)
          std::memcpy(&numbers[(first * num_groups + group * count) * quads + quad * count + r], one.numbers + 4 * quad, 4);
        scales[place] = one.scale, starts[place] = -Kind::zero * one.sum, totals[place] = one.scale * one.sum;
      }
  }
  std::vector<RoundedProduct> rounded;
  for (const Product& one : all) rounded.push_back({&rows, &one});
  // A product of 8 bits takes a quarter of the time of one of 32.
  return run_panels<RoundedProduct, multiply_rounded_panel<Kind>>(
      rounded, words * group_size * num_groups * num_rows / 2, num_groups / Kind::num_groups * Kind::bytes);
}

// A kind of panels of integers: numbers of a line, and products with them.
struct Integers {
  int64_t bytes, size;
  AOTITorchError (*multiply)(const std::vector<Product>&);
};

template <typename Kind>
constexpr Integers integers = {Kind::bytes, Kind::group_size * Kind::num_groups, multiply_all_rounded<Kind>};

constexpr Integers kinds[] = {integers<Eight>,
                              integers<Block<4, 32, 1, false>>,
                              integers<Block<4, 32, 1, true>>,
                              integers<Block<8, 32, 1, false>>,
                              integers<Block<8, 32, 1, true>>,
                              integers<Block<4, 32, 8, true>>,
                              integers<Block<8, 32, 8, true>>,
                              integers<Block<8, 32, 8, false>>,
                              integers<Block<4, 16, 16, false>>,
                              integers<Block<8, 16, 16, false>>,
                              integers<Block<4, 16, 16, true>>};

// The bytes of a line, or of a block, tell how panels store their numbers.
AOTITorchError multiply_kind(const std::vector<Product>& all, int64_t line_bytes) {
  if (all.front().num_rows == 0) return AOTI_TORCH_SUCCESS;
  if (line_bytes == Bfloat16::bytes) return multiply_all<Bfloat16>(all);
  if (line_bytes == Float16::name) return multiply_all<Float16>(all);
  if (line_bytes == Float32::bytes) return multiply_all<Float32>(all);
  for (const Integers& kind : kinds)
    if (kind.bytes == line_bytes) return kind.multiply(all);
  return AOTI_TORCH_FAILURE;
}

int64_t block_size_of(int64_t line_bytes) {
  for (const Integers& kind : kinds)
    if (kind.bytes == line_bytes) return kind.size;
  return 1;
}

}  // namespace

// rows [..., depth] float32 x panels [panels, depth, 16 words or 32 numbers], or [panels, blocks, bytes], of one or several matrices
// -> [..., sum of widths] float32
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle rows, const AtenTensorHandle* panels, int64_t num_matrices, const int64_t* widths, int64_t num_widths,
    AtenTensorHandle* out) {
  constexpr int64_t most = 8;
  int64_t dim, *sizes, out_sizes[most], strides[most];
  int32_t type;
  bool rows_dense;
  void *from, *to;
  if (aoti_torch_get_dim(rows, &dim) || aoti_torch_get_sizes(rows, &sizes) || aoti_torch_get_dtype(rows, &type) ||
      aoti_torch_is_contiguous(rows, &rows_dense) || aoti_torch_get_data_ptr(rows, &from))
    return AOTI_TORCH_FAILURE;
  if (dim < 1 || dim > most || type != aoti_torch_dtype_float32() || !rows_dense || num_matrices < 1 || num_matrices != num_widths)
    return AOTI_TORCH_FAILURE;
  const int64_t depth = sizes[dim - 1];
  int64_t num_rows = 1, width = 0, stride = 1;
  for (int64_t d = 0; d < dim - 1; d++) num_rows *= sizes[d];
  std::vector<Product> all;
  std::vector<int64_t> kinds_of;
  for (int64_t i = 0; i < num_matrices; i++) {
    int64_t* shape;
    int32_t panels_type;
    bool panels_dense;
    void* matrix;
    if (aoti_torch_get_sizes(panels[i], &shape) || aoti_torch_get_dtype(panels[i], &panels_type) ||
        aoti_torch_is_contiguous(panels[i], &panels_dense) || aoti_torch_get_data_ptr(panels[i], &matrix))
      return AOTI_TORCH_FAILURE;
    const bool is_half = panels_type == aoti_torch_dtype_float16(), is_bytes = panels_type == aoti_torch_dtype_uint8();
    const int64_t bytes = is_half ? Float16::name : shape[2] * (is_bytes ? 1 : 4), block_size = block_size_of(bytes);
    if ((depth + block_size - 1) / block_size != shape[1] || !panels_dense) return AOTI_TORCH_FAILURE;
    kinds_of.push_back(bytes);
    all.push_back({static_cast<float*>(from), static_cast<char*>(matrix), nullptr, num_rows, depth, widths[i], 0});
    width += widths[i];
  }
  for (int64_t d = dim - 1; d >= 0; d--) {
    out_sizes[d] = d == dim - 1 ? width : sizes[d];
    strides[d] = stride;
    stride *= out_sizes[d];
  }
  if (aoti_torch_empty_strided(dim, out_sizes, strides, type, aoti_torch_device_type_cpu(), 0, out) || aoti_torch_get_data_ptr(*out, &to))
    return AOTI_TORCH_FAILURE;
  float* column = static_cast<float*>(to);
  for (Product& one : all) one.out = column, one.stride = width, column += one.width;
  const ReleasedLock lock(num_rows * depth * width);
  // Matrices that were of one kind when the program was compiled may be of several: training changes single ones.
  for (int64_t first = 0, end = 0; first < num_matrices; first = end) {
    while (end < num_matrices && kinds_of[end] == kinds_of[first]) end++;
    if (multiply_kind({all.begin() + first, all.begin() + end}, kinds_of[first])) return AOTI_TORCH_FAILURE;
  }
  return AOTI_TORCH_SUCCESS;
}

// The same for one matrix outside of compiled programs, on memory that the caller owns.
extern "C" __attribute__((visibility("default"))) AOTITorchError monge_packed_linear(
    const float* rows, const char* panels, float* out, int64_t num_rows, int64_t depth, int64_t width, int64_t line_bytes) {
  return multiply_kind({{rows, panels, out, num_rows, depth, width, width}}, line_bytes);
}
