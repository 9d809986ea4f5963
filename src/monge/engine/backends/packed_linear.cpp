// Products of a few rows with a matrix in panels: every number of the matrix is fetched once for all rows.
//
// A panel is 32 columns. Its lines, one for every number of a row that is multiplied, lie one behind another. A line of bfloat16
// numbers is 16 words, column j in the lower half of word j and column 16 + j in the upper; one of float32 numbers is 32 of them.
// A sum is taken in the order of the lines, whatever the number of rows: a row's result does not depend on its neighbours.

#include <cstdint>
#include <cstring>

#if __has_include(<torch/csrc/stable/c/shim.h>)
#include <torch/csrc/stable/c/shim.h>
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

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

struct Bfloat16 {
  static constexpr int64_t bytes = 4 * words;
  static void load(const char* line, int group, Floats& first, Floats& second) {
    Words both;
    std::memcpy(&both, line + sizeof both * group, sizeof both);
    first = (Floats)(both << 16);
    second = (Floats)(both & 0xffff0000u);
  }
};

struct Float32 {
  static constexpr int64_t bytes = 8 * words;
  static void load(const char* line, int group, Floats& first, Floats& second) {
    std::memcpy(&first, line + sizeof first * group, sizeof first);
    std::memcpy(&second, line + 4 * words + sizeof second * group, sizeof second);
  }
};

struct Product {
  const float* rows;
  const char* panels;
  float* out;
  int64_t num_rows, depth, width;
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
      if (left > 0) std::memcpy(all.out + (row + r) * all.width + column, &sum, 4 * (left < lanes ? left : lanes));
    }
}

template <typename Kind>
void multiply_panels(int64_t begin, int64_t end, void* context) {
  const Product& all = *static_cast<const Product*>(context);
  const int64_t blocks = (all.num_rows + most_rows - 1) / most_rows;  // of rows, about equally large
  for (int64_t panel = begin; panel < end; panel++)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t row = all.num_rows * block / blocks;
      multiply<Kind, most_rows>(all, row, all.num_rows * (block + 1) / blocks - row, panel);
    }
}

template <typename Kind>
AOTITorchError multiply_all(Product& all) {
  if (all.num_rows == 0) return AOTI_TORCH_SUCCESS;
  const int64_t panels = (all.width + 2 * words - 1) / (2 * words);
#if defined(TORCH_VERSION_2_10_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
  const int64_t products = 2 * words * all.depth * all.num_rows;  // of a panel; none where there is nothing to sum
  const int64_t by_products = thread_products / (products + 1) + 1, by_bytes = thread_bytes / (all.depth * Kind::bytes + 1) + 1;
  const int64_t grain = by_products < by_bytes ? by_products : by_bytes;
  return torch_parallel_for(0, panels, grain, multiply_panels<Kind>, &all);
#else
  multiply_panels<Kind>(0, panels, &all);
  return AOTI_TORCH_SUCCESS;
#endif
}

}  // namespace

// rows [..., depth] float32 x panels [panels, depth, 16 words or 32 numbers] -> [..., width] float32
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle rows, AtenTensorHandle panels, int64_t width, AtenTensorHandle* out) {
  constexpr int64_t most = 8;
  int64_t dim, *sizes, *shape, out_sizes[most], strides[most];
  int32_t type, panels_type;
  bool rows_dense, panels_dense;
  void *from, *matrix, *to;
  if (aoti_torch_get_dim(rows, &dim) || aoti_torch_get_sizes(rows, &sizes) || aoti_torch_get_sizes(panels, &shape) ||
      aoti_torch_get_dtype(rows, &type) || aoti_torch_get_dtype(panels, &panels_type) ||
      aoti_torch_is_contiguous(rows, &rows_dense) || aoti_torch_is_contiguous(panels, &panels_dense))
    return AOTI_TORCH_FAILURE;
  if (dim < 1 || dim > most || type != aoti_torch_dtype_float32() || sizes[dim - 1] != shape[1] || !rows_dense || !panels_dense)
    return AOTI_TORCH_FAILURE;
  int64_t num_rows = 1, stride = 1;
  for (int64_t d = dim - 1; d >= 0; d--) {
    out_sizes[d] = d == dim - 1 ? width : sizes[d];
    num_rows *= d == dim - 1 ? 1 : sizes[d];
    strides[d] = stride;
    stride *= out_sizes[d];
  }
  if (aoti_torch_empty_strided(dim, out_sizes, strides, type, aoti_torch_device_type_cpu(), 0, out) ||
      aoti_torch_get_data_ptr(rows, &from) || aoti_torch_get_data_ptr(panels, &matrix) || aoti_torch_get_data_ptr(*out, &to))
    return AOTI_TORCH_FAILURE;
  Product all{static_cast<float*>(from), static_cast<char*>(matrix), static_cast<float*>(to), num_rows, shape[1], width};
  return panels_type == aoti_torch_dtype_int32() ? multiply_all<Bfloat16>(all) : multiply_all<Float32>(all);
}
