// Attention of few queries by AVX-512. A key and a value are read once for eight queries, and none behind the last slot
// that a query attends to; what a query gives depends on its own slots alone, which are summed one after the other.
// decode/model/quantized/vnni.py builds this.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t QUERIES = 8; // that are multiplied together
constexpr float LEAST = -200;  // whose exponential is 0

// Within 2 units of the last place; NaN of NaN.
inline __m512 exponential(__m512 x) {
  x = _mm512_max_ps(_mm512_set1_ps(LEAST), x);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (const float term : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(term));
  return _mm512_scalef_ps(sum, n);
}

struct Head {
  const float* query;  // [Q, D]
  const float* key;    // [S, D]
  const float* value;  // [S, D]
  const bool* allowed; // [T, S]; query number q is of token q % T
  float* out;          // [Q, D]
  int64_t T, S, D;
  float scale;

  int64_t end(int64_t query_number) const {
    const bool* row = allowed + query_number % T * S;
    int64_t slot = S;
    while (slot > 0 && !row[slot - 1]) slot--;
    return slot;
  }

  // The queries first ... first + M.
  template <int M>
  void run(int64_t first, std::vector<float>& room) const {
    int64_t slots = 0;
    for (int m = 0; m < M; m++) slots = std::max(slots, end(first + m));
    const int64_t width = (slots + LANES - 1) / LANES * LANES;
    room.resize(M * width);
    float* score = room.data(); // [M, width]
    multiply_keys<M>(first, slots, width, score);
    float total[M];
    for (int m = 0; m < M; m++) exponentials(allowed + (first + m) % T * S, slots, width, score + m * width);
    for (int64_t d = 0; d < D; d += 2 * LANES) {
      if (D - d > LANES) multiply_values<M, 2>(first, d, slots, width, score, total);
      else multiply_values<M, 1>(first, d, slots, width, score, total);
    }
  }

  template <int M>
  void multiply_keys(int64_t first, int64_t slots, int64_t width, float* score) const {
    const float* rows = query + first * D;
    for (int64_t k = 0; k < slots; k++) {
      __m512 sum[M];
      for (int m = 0; m < M; m++) sum[m] = _mm512_setzero_ps();
      for (int64_t d = 0; d < D; d += LANES) {
        const __m512 at = _mm512_loadu_ps(key + k * D + d);
        for (int m = 0; m < M; m++) sum[m] = _mm512_fmadd_ps(at, _mm512_loadu_ps(rows + m * D + d), sum[m]);
      }
      for (int m = 0; m < M; m++) score[m * width + k] = scale * _mm512_reduce_add_ps(sum[m]);
    }
  }

  // In place, those of the differences to the largest; 0 where it is not allowed and behind the slots.
  static void exponentials(const bool* allowed, int64_t slots, int64_t width, float* score) {
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 largest = none;
    for (int64_t k = 0; k < width; k += LANES) {
      const __mmask16 inside = static_cast<__mmask16>((1u << std::min(LANES, slots - k)) - 1);
      const __m128i bytes = _mm_maskz_loadu_epi8(inside, allowed + k);
      const __m512 value = _mm512_mask_loadu_ps(none, _mm_test_epi8_mask(bytes, bytes), score + k);
      _mm512_storeu_ps(score + k, value);
      largest = _mm512_max_ps(largest, value);
    }
    const float most = _mm512_reduce_max_ps(largest);
    const __m512 from = _mm512_set1_ps(std::max(most, std::numeric_limits<float>::lowest()));
    for (int64_t k = 0; k < width; k += LANES)
      _mm512_storeu_ps(score + k, exponential(_mm512_sub_ps(_mm512_loadu_ps(score + k), from)));
  }

  // NB vectors of the values' numbers d ...; the first ones bring the total of a query's exponentials as well.
  template <int M, int NB>
  void multiply_values(int64_t first, int64_t d, int64_t slots, int64_t width, const float* score,
                       float* total) const {
    __m512 sum[M][NB];
    for (int m = 0; m < M; m++)
      for (int b = 0; b < NB; b++) sum[m][b] = _mm512_setzero_ps();
    for (int64_t k = 0; k < slots; k++)
      for (int b = 0; b < NB; b++) {
        const __m512 at = _mm512_loadu_ps(value + k * D + d + b * LANES);
        for (int m = 0; m < M; m++)
          sum[m][b] = _mm512_fmadd_ps(_mm512_set1_ps(score[m * width + k]), at, sum[m][b]);
      }
    if (d == 0) {
      std::fill(total, total + M, 0.0f);
      for (int64_t k = 0; k < slots; k++)
        for (int m = 0; m < M; m++) total[m] += score[m * width + k];
    }
    for (int m = 0; m < M; m++) {
      const __m512 by = _mm512_set1_ps(total[m] == 0 ? 0 : 1 / total[m]);
      for (int b = 0; b < NB; b++)
        _mm512_storeu_ps(out + (first + m) * D + d + b * LANES, _mm512_mul_ps(sum[m][b], by));
    }
  }
};

template <int... M>
void run_queries(const Head& head, int64_t first, int64_t count, std::vector<float>& room,
                 std::integer_sequence<int, M...>) {
  (void)((count == M + 1 && (head.run<M + 1>(first, room), true)) || ...);
}

at::Tensor with_whole_rows(const at::Tensor& buffer) {
  return buffer.stride(3) == 1 && buffer.stride(2) == buffer.size(3) ? buffer : buffer.contiguous();
}

at::Tensor few_queries_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const at::Tensor& allowed, double scale) {
  const at::Tensor queries = query.contiguous(), mask = allowed.contiguous();
  const at::Tensor keys = with_whole_rows(key), values = with_whole_rows(value);
  const int64_t B = queries.size(0), H = queries.size(1), Q = queries.size(2), D = queries.size(3);
  at::Tensor out = at::empty({B, H, Q, D}, queries.options());
  const int64_t T = mask.size(1), S = mask.size(2), blocks = (Q + QUERIES - 1) / QUERIES;
  at::parallel_for(0, B * H * blocks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> room;
    for (int64_t task = begin; task < end; task++) {
      const int64_t b = task / blocks / H, h = task / blocks % H, first = task % blocks * QUERIES;
      const Head head{queries.const_data_ptr<float>() + (b * H + h) * Q * D,
                      keys.const_data_ptr<float>() + b * keys.stride(0) + h * keys.stride(1),
                      values.const_data_ptr<float>() + b * values.stride(0) + h * values.stride(1),
                      mask.const_data_ptr<bool>() + b % mask.size(0) * T * S,
                      out.mutable_data_ptr<float>() + (b * H + h) * Q * D,
                      T, S, D, static_cast<float>(scale)};
      run_queries(head, first, std::min(QUERIES, Q - first), room, std::make_integer_sequence<int, QUERIES>{});
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("few_queries_attention(Tensor query, Tensor key, Tensor value, Tensor allowed, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) { library.impl("few_queries_attention", few_queries_attention); }
