// Attention of a few queries to a cache: heads that share keys and values read them together.
//
// A result depends on its query and on the keys and values that it sees, in their order, and on nothing else: not on how many
// queries are read, not on hidden columns, and not on the columns where the visible ones lie. Scores are sums over the lanes of one
// key, weights are summed in lanes by the rank of their column among the visible ones, and values are added in the order of the columns.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if __has_include(<torch/csrc/stable/c/shim.h>)
#include <torch/csrc/stable/c/shim.h>
#else
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#endif

#include "released_lock.h"

namespace {

#ifdef __AVX512F__
constexpr int lanes = 16;
#else
constexpr int lanes = 8;
#endif
constexpr int most_heads = 4;  // that share a pass over keys and values: their sums fit into the registers
constexpr int most_vectors = 4;
constexpr int64_t thread_products = 1 << 17;  // that are worth a thread

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));

inline Floats load(const float* from) {
  Floats values;
  std::memcpy(&values, from, sizeof values);
  return values;
}

inline Floats everywhere(float value) { return value - Floats{}; }  // adding zero would lose the sign of zero

// Lanes 2j (odd = 0) or 2j + 1 (odd = 1) of two vectors that lie one behind the other.
template <int odd>
inline Floats half(Floats a, Floats b) {
#if defined(__clang__)
  if constexpr (lanes == 16)
    return __builtin_shufflevector(a, b, odd, 2 + odd, 4 + odd, 6 + odd, 8 + odd, 10 + odd, 12 + odd, 14 + odd, 16 + odd, 18 + odd,
                                   20 + odd, 22 + odd, 24 + odd, 26 + odd, 28 + odd, 30 + odd);
  else
    return __builtin_shufflevector(a, b, odd, 2 + odd, 4 + odd, 6 + odd, 8 + odd, 10 + odd, 12 + odd, 14 + odd);
#else
  Ints places;
  for (int lane = 0; lane < lanes; lane++) places[lane] = 2 * lane + odd;
  return __builtin_shuffle(a, b, places);
#endif
}

// Lane j of the result is the sum of the lanes of vector j.
template <int count>
inline Floats sums_of(const Floats* vectors) {
  if constexpr (count == 1) {
    return vectors[0];
  } else {
    const Floats a = sums_of<count / 2>(vectors), b = sums_of<count / 2>(vectors + count / 2);
    return half<0>(a, b) + half<1>(a, b);
  }
}

inline float sum_of(Floats values) {
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; lane++) values[lane] += values[lane + width];
  return values[0];
}

// e^x for x <= 0, NaN for NaN; the error is at most 2 units in the last place, and results below the smallest normal number are 0.
inline Floats exponential(Floats x) {
  const Floats shift = everywhere(12582912.0f);  // 1.5 * 2^23: the nearest integer is in the lower bits of the sum
  const Floats shifted = x * 1.44269504f + shift, whole = shifted - shift;
  Floats rest = x - whole * 0.693145752f;
  rest = rest - whole * 1.42860677e-6f;
  Floats value = everywhere(1.98756915e-4f);
  for (float factor : {1.39819995e-3f, 8.33345191e-3f, 4.16657959e-2f, 1.66666655e-1f, 5.0e-1f}) value = value * rest + factor;
  value = value * rest * rest + rest + 1.0f;
  const Ints bits = (((Ints)shifted - (Ints)shift) + 127) << 23;
  const Ints is_tiny = x < -87.0f;
  return (Floats)((Ints)(value * (Floats)bits) & ~is_tiny);
}

struct Tensor4 {
  const float* data;
  int64_t batch, heads, rows;  // strides; numbers of a row lie side by side
};

struct Attention {
  Tensor4 queries, keys, values;
  const uint8_t* mask;
  int64_t mask_batch, mask_rows;
  float* out;  // [batch, nodes, heads, value_dim]
  int64_t num_batch, num_heads, num_shared, num_nodes, num_columns, dim, value_dim;
  float scale;
};

// Visible columns of a query in their order.
void visible_columns(const uint8_t* mask, int64_t count, std::vector<int32_t>& columns) {
  columns.clear();
  for (int64_t begin = 0; begin < count;) {
    const void* first = std::memchr(mask + begin, 1, count - begin);
    if (!first) return;
    begin = static_cast<const uint8_t*>(first) - mask;
    const void* last = std::memchr(mask + begin, 0, count - begin);
    const int64_t end = last ? static_cast<const uint8_t*>(last) - mask : count;
    for (; begin < end; begin++) columns.push_back(begin);
  }
}

struct Scratch {
  std::vector<int32_t> columns;
  std::vector<float> queries, weights, filled;
};

// Products of G queries with `lanes` keys; `vectors` is the length of a query in vectors, filled with zeros.
template <int G>
[[gnu::noinline]] void score(const float* queries, const float* const* keys, int64_t vectors, float* out, int64_t stride) {
  constexpr int together = lanes == 16 ? 4 : 2;
  Floats sums[G][lanes];
  for (int first = 0; first < lanes; first += together) {
    Floats own[G][together] = {};
    for (int64_t k = 0; k < vectors; k++)
      for (int c = 0; c < together; c++) {
        const Floats key = load(keys[first + c] + k * lanes);
        for (int g = 0; g < G; g++) own[g][c] += load(queries + (g * vectors + k) * lanes) * key;
      }
    for (int g = 0; g < G; g++)
      for (int c = 0; c < together; c++) sums[g][first + c] = own[g][c];
  }
  for (int g = 0; g < G; g++) {
    const Floats all = sums_of<lanes>(sums[g]);
    std::memcpy(out + g * stride, &all, sizeof all);
  }
}

// Adds V vectors of the weighted values for G queries. Not inlined: the compiler would then keep sums in memory.
template <int G, int V>
[[gnu::noinline]] void mix(const float* weights, int64_t stride, const int32_t* columns, int64_t count, const float* values,
                           int64_t row_stride, const Floats* total, float* out, int64_t out_stride) {
  Floats sums[G][V] = {};
  for (int64_t i = 0; i < count; i++) {
    const float* row = values + columns[i] * row_stride;
    for (int v = 0; v < V; v++) {
      const Floats value = load(row + v * lanes);
      for (int g = 0; g < G; g++) sums[g][v] += everywhere(weights[g * stride + i]) * value;
    }
  }
  for (int g = 0; g < G; g++)
    for (int v = 0; v < V; v++) {
      const Floats mixed = sums[g][v] / total[g];
      std::memcpy(out + g * out_stride + v * lanes, &mixed, sizeof mixed);
    }
}

template <int G>
void mix_vectors(int64_t vectors, const float* weights, int64_t stride, const int32_t* columns, int64_t count, const float* values,
                 int64_t row_stride, const Floats* total, float* out, int64_t out_stride) {
  for (int64_t v = 0; v < vectors;) {
    const float* from = values + v * lanes;
    float* to = out + v * lanes;
    if (vectors - v >= most_vectors) {
      mix<G, most_vectors>(weights, stride, columns, count, from, row_stride, total, to, out_stride);
      v += most_vectors;
    } else {
      mix<G, 1>(weights, stride, columns, count, from, row_stride, total, to, out_stride);
      v += 1;
    }
  }
}

// G heads of one node, which share keys and values.
template <int G>
void attend(const Attention& all, int64_t batch, int64_t shared, int64_t node, int64_t head, Scratch& scratch) {
  const std::vector<int32_t>& columns = scratch.columns;
  const int64_t count = columns.size(), groups = (count + lanes - 1) / lanes, stride = groups * lanes;
  const int64_t vectors = (all.dim + lanes - 1) / lanes, whole = all.value_dim / lanes, rest = all.value_dim % lanes;
  scratch.queries.assign(G * vectors * lanes, 0.0f);
  scratch.weights.resize(G * stride);
  for (int g = 0; g < G; g++) {
    const float* query =
        all.queries.data + batch * all.queries.batch + (head + g) * all.queries.heads + node * all.queries.rows;
    for (int64_t k = 0; k < all.dim; k++) scratch.queries[g * vectors * lanes + k] = query[k] * all.scale;
  }
  const float* keys = all.keys.data + batch * all.keys.batch + shared * all.keys.heads;
  if (all.dim % lanes) scratch.filled.assign(lanes * vectors * lanes, 0.0f);
  for (int64_t group = 0; group < groups; group++) {
    const float* rows[lanes];
    for (int lane = 0; lane < lanes; lane++) {
      const int64_t rank = group * lanes + lane;
      rows[lane] = keys + columns[rank < count ? rank : count - 1] * all.keys.rows;
      if (all.dim % lanes)
        rows[lane] = static_cast<float*>(std::memcpy(&scratch.filled[lane * vectors * lanes], rows[lane], 4 * all.dim));
    }
    score<G>(scratch.queries.data(), rows, vectors, &scratch.weights[group * lanes], stride);
  }
  Floats total[G];
  for (int g = 0; g < G; g++) {
    float* weights = &scratch.weights[g * stride];
    for (int64_t rank = count; rank < stride; rank++) weights[rank] = -INFINITY;
    Floats most = everywhere(-INFINITY);
    for (int64_t rank = 0; rank < stride; rank += lanes) {
      const Floats scores = load(weights + rank);
      most = scores > most ? scores : most;
    }
    float largest = most[0];
    for (int lane = 1; lane < lanes; lane++) largest = most[lane] > largest ? most[lane] : largest;
    Floats sums = {};
    for (int64_t rank = 0; rank < stride; rank += lanes) {
      const Floats weight = exponential(load(weights + rank) - largest);
      std::memcpy(weights + rank, &weight, sizeof weight);
      sums += weight;
    }
    total[g] = everywhere(sum_of(sums));
  }
  const float* values = all.values.data + batch * all.values.batch + shared * all.values.heads;
  float* out = all.out + ((batch * all.num_nodes + node) * all.num_heads + head) * all.value_dim;
  mix_vectors<G>(whole, scratch.weights.data(), stride, columns.data(), count, values, all.values.rows, total, out, all.value_dim);
  for (int g = 0; g < G; g++)
    for (int64_t v = all.value_dim - rest; v < all.value_dim; v++) {
      float sum = 0.0f;
      for (int64_t i = 0; i < count; i++) sum += scratch.weights[g * stride + i] * values[columns[i] * all.values.rows + v];
      out[g * all.value_dim + v] = sum / total[g][0];
    }
}

void attend_all(int64_t begin, int64_t end, void* context) {
  const Attention& all = *static_cast<const Attention*>(context);
  thread_local Scratch scratch;
  const int64_t per_shared = all.num_heads / all.num_shared;
  for (int64_t unit = begin; unit < end; unit++) {
    const int64_t node = unit % all.num_nodes, shared = unit / all.num_nodes % all.num_shared;
    const int64_t batch = unit / all.num_nodes / all.num_shared;
    visible_columns(all.mask + batch * all.mask_batch + node * all.mask_rows, all.num_columns, scratch.columns);
    for (int64_t done = 0; done < per_shared;) {
      const int64_t head = shared * per_shared + done, left = per_shared - done;
      if (left >= 4 && left != 5)
        attend<4>(all, batch, shared, node, head, scratch), done += 4;
      else if (left >= 3)
        attend<3>(all, batch, shared, node, head, scratch), done += 3;
      else if (left == 2)
        attend<2>(all, batch, shared, node, head, scratch), done += 2;
      else
        attend<1>(all, batch, shared, node, head, scratch), done += 1;
    }
  }
}

AOTITorchError run(Attention& all) {
  const int64_t units = all.num_batch * all.num_shared * all.num_nodes;
  if (units == 0) return AOTI_TORCH_SUCCESS;
#if defined(TORCH_VERSION_2_10_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_10_0
  const int64_t products = all.num_heads / all.num_shared * all.num_columns * (all.dim + all.value_dim);
  return torch_parallel_for(0, units, thread_products / (products + 1) + 1, attend_all, &all);
#else
  attend_all(0, units, &all);
  return AOTI_TORCH_SUCCESS;
#endif
}

bool read(AtenTensorHandle from, int64_t*& sizes, int64_t*& strides, void*& data, int32_t wanted) {
  int64_t dim;
  int32_t type;
  return !aoti_torch_get_dim(from, &dim) && dim == 4 && !aoti_torch_get_dtype(from, &type) && type == wanted &&
         !aoti_torch_get_sizes(from, &sizes) && !aoti_torch_get_strides(from, &strides) && !aoti_torch_get_data_ptr(from, &data) &&
         (strides[3] == 1 || sizes[3] == 1);
}

}  // namespace

// queries [batch, heads, nodes, dim], keys [batch, shared, columns, dim], values [batch, shared, columns, value_dim], float32, and
// mask [batch or 1, 1, nodes, columns], bool -> [batch, nodes, heads, value_dim]
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_grouped_attention(
    AtenTensorHandle queries, AtenTensorHandle keys, AtenTensorHandle values, AtenTensorHandle mask, double scale,
    AtenTensorHandle* out) {
  int64_t *query_sizes, *key_sizes, *value_sizes, *mask_sizes, *query_strides, *key_strides, *value_strides, *mask_strides;
  void *query_data, *key_data, *value_data, *mask_data, *to;
  const int32_t type = aoti_torch_dtype_float32();
  if (!read(queries, query_sizes, query_strides, query_data, type) || !read(keys, key_sizes, key_strides, key_data, type) ||
      !read(values, value_sizes, value_strides, value_data, type) ||
      !read(mask, mask_sizes, mask_strides, mask_data, aoti_torch_dtype_bool()))
    return AOTI_TORCH_FAILURE;
  const int64_t batch = query_sizes[0], heads = query_sizes[1], nodes = query_sizes[2], shared = key_sizes[1];
  const int64_t columns = mask_sizes[3], value_dim = value_sizes[3];
  if (shared < 1 || heads % shared || value_sizes[1] != shared || key_sizes[3] != query_sizes[3] || mask_sizes[2] != nodes ||
      key_sizes[2] < columns || value_sizes[2] < columns || key_sizes[0] != batch || value_sizes[0] != batch)
    return AOTI_TORCH_FAILURE;
  const int64_t sizes[4] = {batch, nodes, heads, value_dim};
  const int64_t strides[4] = {nodes * heads * value_dim, heads * value_dim, value_dim, 1};
  if (aoti_torch_empty_strided(4, sizes, strides, type, aoti_torch_device_type_cpu(), 0, out) || aoti_torch_get_data_ptr(*out, &to))
    return AOTI_TORCH_FAILURE;
  Attention all{{static_cast<float*>(query_data), query_strides[0], query_strides[1], query_strides[2]},
                {static_cast<float*>(key_data), key_strides[0], key_strides[1], key_strides[2]},
                {static_cast<float*>(value_data), value_strides[0], value_strides[1], value_strides[2]},
                static_cast<uint8_t*>(mask_data),
                mask_sizes[0] == 1 ? 0 : mask_strides[0],
                mask_strides[2],
                static_cast<float*>(to),
                batch,
                heads,
                shared,
                nodes,
                columns,
                query_sizes[3],
                value_dim,
                static_cast<float>(scale)};
  const ReleasedLock lock(batch * heads * nodes * columns * (query_sizes[3] + value_dim));
  return run(all);
}

// The same outside of compiled programs. `layout` holds batch, heads, shared, nodes, columns, dim, value_dim, then the strides of
// batch, heads and rows of queries, keys and values, and of batch and rows of the mask.
extern "C" __attribute__((visibility("default"))) AOTITorchError monge_grouped_attention(
    const float* queries, const float* keys, const float* values, const uint8_t* mask, float* out, const int64_t* layout, double scale) {
  const int64_t* strides = layout + 7;
  Attention all{{queries, strides[0], strides[1], strides[2]},
                {keys, strides[3], strides[4], strides[5]},
                {values, strides[6], strides[7], strides[8]},
                mask,
                strides[9],
                strides[10],
                out,
                layout[0],
                layout[1],
                layout[2],
                layout[3],
                layout[4],
                layout[5],
                layout[6],
                static_cast<float>(scale)};
  return run(all);
}
