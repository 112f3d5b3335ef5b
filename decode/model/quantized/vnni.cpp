// Products of few rows with weights of eight and four bits, by AVX512-VNNI. A weight is read once, in order, for eight
// rows; what a row gives does not depend on the others. decode/model/quantized/vnni.py builds this and packs weights.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int64_t LANES = 16;      // outputs of a vector
constexpr int64_t ROWS = 8;        // rows whose sums stay in registers
constexpr int64_t GROUP = 32;      // inputs that share a scale in four bits
constexpr int64_t GROUP_BYTES = 2 * 2 * LANES + GROUP * LANES / 2;  // scales and what is added in fp16, then numbers
constexpr int64_t AHEAD = 2560;    // bytes: memory is asked for what comes so much later
constexpr int64_t GRAIN = 1 << 15; // weights that are worth a thread

inline __m512i broadcast(const void* four_bytes) {
  int value;
  std::memcpy(&value, four_bytes, 4);
  return _mm512_set1_epi32(value);
}

inline __m512 from_fp16(const uint8_t* numbers) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)));
}

inline __mmask16 lanes(int64_t outputs) { return static_cast<__mmask16>((1u << std::min(LANES, outputs)) - 1); }

// Runs tile(rows, n) for all blocks of 2 * LANES outputs and of ROWS rows: Tile::run<M, NB>, M rows and NB vectors.
template <typename Tile, int NB, int... M>
void run_rows(const Tile& tile, int64_t first, int64_t rows, int64_t n, std::integer_sequence<int, M...>) {
  (void)((rows == M + 1 && (tile.template run<M + 1, NB>(first, n), true)) || ...);
}

template <typename Tile>
void run_tiles(const Tile& tile, int64_t rows, int64_t inputs, int64_t outputs) {
  const int64_t width = 2 * LANES, blocks = (outputs + width - 1) / width;
  const auto all = std::make_integer_sequence<int, ROWS>{};
  at::parallel_for(0, blocks, std::max<int64_t>(1, GRAIN / (width * inputs)), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin * width; n < end * width && n < outputs; n += width)
      for (int64_t first = 0; first < rows; first += ROWS) {
        const int64_t count = std::min(ROWS, rows - first);
        if (outputs - n > LANES) run_rows<Tile, 2>(tile, first, count, n, all);
        else run_rows<Tile, 1>(tile, first, count, n, all);
      }
  });
}

// ---- eight bits ----

struct Int8Tile {
  const uint8_t* x;       // [M, K], 128 more than the numbers
  const int8_t* weight;   // [N / 16, K / 4, 16, 4]
  const int32_t* offset;  // [N], 128 times the sum of an output's weights
  const float* scale;     // [N]
  float* out;             // [M, N]
  int64_t K, N;

  template <int M, int NB>
  void run(int64_t first, int64_t n) const {
    const uint8_t* rows = x + first * K;
    const int8_t* block = weight + n * K;
    __m512i sum[M][NB];
    for (int m = 0; m < M; m++)
      for (int b = 0; b < NB; b++) sum[m][b] = _mm512_setzero_si512();
    for (int64_t k = 0; k < K; k += 4) {
      __m512i w[NB];
      for (int b = 0; b < NB; b++) {
        const int8_t* at = block + (b * K + k) * LANES;
        _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD), _MM_HINT_T0);
        w[b] = _mm512_loadu_si512(at);
      }
      for (int m = 0; m < M; m++) {
        const __m512i a = broadcast(rows + m * K + k);
        for (int b = 0; b < NB; b++) sum[m][b] = _mm512_dpbusd_epi32(sum[m][b], a, w[b]);
      }
    }
    for (int b = 0; b < NB; b++) {
      const int64_t at = n + b * LANES;
      const __mmask16 mask = lanes(N - at);
      const __m512i minus = _mm512_maskz_loadu_epi32(mask, offset + at);
      const __m512 by = _mm512_maskz_loadu_ps(mask, scale + at);
      for (int m = 0; m < M; m++) {
        const __m512 value = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[m][b], minus));
        _mm512_mask_storeu_ps(out + (first + m) * N + at, mask, _mm512_mul_ps(value, by));
      }
    }
  }
};

at::Tensor int8_product(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& scale,
                        const at::Tensor& offset) {
  const at::Tensor rows = x.contiguous();
  const int64_t M = rows.size(0), K = rows.size(1), N = scale.size(0);
  at::Tensor out = at::empty({M, N}, scale.options());
  const Int8Tile tile{rows.const_data_ptr<uint8_t>(), weight.const_data_ptr<int8_t>(),
                      offset.const_data_ptr<int32_t>(), scale.const_data_ptr<float>(),
                      out.mutable_data_ptr<float>(), K, N};
  run_tiles(tile, M, K, N);
  return out;
}

// ---- four bits ----

struct Int4Tile {
  const int8_t* x;        // [M, K], whole numbers of -127 ... 127
  const float* step;      // [M, G], what one stands for in each group of inputs
  const float* sum;       // [M, G], the sum of a group's inputs
  const uint8_t* weight;  // [N / 16, G, GROUP_BYTES]
  float* out;             // [M, N]
  int64_t G, N;

  template <int M, int NB>
  void run(int64_t first, int64_t n) const {
    const __m512i low_bits = _mm512_set1_epi8(15);
    const int8_t* rows = x + first * G * GROUP;
    const float *steps = step + first * G, *sums = sum + first * G;
    const uint8_t* block = weight + n / LANES * G * GROUP_BYTES;
    __m512 total[M][NB];
    for (int m = 0; m < M; m++)
      for (int b = 0; b < NB; b++) total[m][b] = _mm512_setzero_ps();
    for (int64_t g = 0; g < G; g++)
      for (int b = 0; b < NB; b++) {
        const uint8_t* at = block + (b * G + g) * GROUP_BYTES;
        for (int64_t byte = 0; byte < GROUP_BYTES; byte += 64)
          _mm_prefetch(reinterpret_cast<const char*>(at + AHEAD + byte), _MM_HINT_T0);
        const __m512 scale = from_fp16(at), added = from_fp16(at + 2 * LANES);
        __m512i dot[M];
        for (int m = 0; m < M; m++) dot[m] = _mm512_setzero_si512();
        for (int part = 0; part < 4; part++) {
          const __m512i both = _mm512_loadu_si512(at + 64 + 64 * part);
          const __m512i low = _mm512_and_si512(both, low_bits);
          const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
          for (int m = 0; m < M; m++) {
            const int8_t* inputs = rows + (m * G + g) * GROUP + 8 * part;
            dot[m] = _mm512_dpbusd_epi32(dot[m], low, broadcast(inputs));
            dot[m] = _mm512_dpbusd_epi32(dot[m], high, broadcast(inputs + 4));
          }
        }
        for (int m = 0; m < M; m++) {
          const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[m]), _mm512_set1_ps(steps[m * G + g]));
          total[m][b] = _mm512_fmadd_ps(_mm512_set1_ps(sums[m * G + g]), added, total[m][b]);
          total[m][b] = _mm512_fmadd_ps(value, scale, total[m][b]);
        }
      }
    for (int b = 0; b < NB; b++) {
      const int64_t at = n + b * LANES;
      for (int m = 0; m < M; m++) _mm512_mask_storeu_ps(out + (first + m) * N + at, lanes(N - at), total[m][b]);
    }
  }
};

at::Tensor int4_product(const at::Tensor& x, const at::Tensor& weight, int64_t N) {
  const at::Tensor inputs = x.contiguous();
  const int64_t M = inputs.size(0), K = inputs.size(1), G = K / GROUP;
  at::Tensor out = at::empty({M, N}, inputs.options());
  std::vector<int8_t> numbers(M * K);
  std::vector<float> step(M * G), sum(M * G);
  const float* from = inputs.const_data_ptr<float>();
  for (int64_t i = 0; i < M * G; i++) {
    const __m512 a = _mm512_loadu_ps(from + i * GROUP), b = _mm512_loadu_ps(from + i * GROUP + LANES);
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    step[i] = std::max(largest, 1e-30f) / 127;
    const __m512i first = _mm512_cvtps_epi32(_mm512_div_ps(a, _mm512_set1_ps(step[i])));
    const __m512i last = _mm512_cvtps_epi32(_mm512_div_ps(b, _mm512_set1_ps(step[i])));
    auto* to = reinterpret_cast<__m128i*>(numbers.data() + i * GROUP);
    _mm_storeu_si128(to, _mm512_cvtsepi32_epi8(first));
    _mm_storeu_si128(to + 1, _mm512_cvtsepi32_epi8(last));
    sum[i] = step[i] * _mm512_reduce_add_epi32(_mm512_add_epi32(first, last));
  }
  const Int4Tile tile{numbers.data(), step.data(), sum.data(), weight.const_data_ptr<uint8_t>(),
                      out.mutable_data_ptr<float>(), G, N};
  run_tiles(tile, M, K, N);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(draftsmith, library) {
  library.def("int8_product(Tensor x, Tensor weight, Tensor scale, Tensor offset) -> Tensor");
  library.def("int4_product(Tensor x, Tensor weight, int outputs) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("int8_product", int8_product);
  library.impl("int4_product", int4_product);
}
