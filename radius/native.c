/* Brings together a flat tensor and the compact vector of its chosen entries, on a CPU.
 *
 * One library serves every x86-64: each kernel is compiled for AVX-512 and for AVX2, and the caller
 * names the instruction set, which must be one that `sparsetron_instruction_set` allows.
 *
 * What `kernels.py` has in Triton; `native.py` calls it. A bitmap is that of
 * `megatron.sparse.reference`: 128 bytes for a block of 1024 entries, the first of eight entries in
 * a byte's highest bit. Whichever are set, nothing is touched beyond the lengths that are given.
 */

#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || !defined(__x86_64__)
#error "needs GCC or Clang, and is for x86-64 alone; torch does the same work without this"
#endif
#include <immintrin.h>

enum { VERSION = 4 };              /* raise it with every change, here and in native_library.py */
enum { BLOCK = 1024, GROUP = 64 }; /* entries: of a block, and looked at together */

#define INLINE static inline __attribute__((always_inline))
#define AVX512 __attribute__((target("avx512f,popcnt")))
#define AVX2 __attribute__((target("avx2,fma,popcnt")))

/* Instruction sets: a processor that has one of them has those before it. */
enum { NO_SET, SET_AVX2, SET_AVX512 };

typedef struct {
    const char *words;    /* [blocks] of 128 bytes */
    const int32_t *patch; /* [blocks], or NULL: where it is not negative, that one of `patches` */
    const char *patches;  /* stands for a block's words */
} Bitmap;

/* Which of the 64 entries from `entry` on are chosen, the first in the lowest bit. */
INLINE uint64_t chosen(Bitmap bits, int64_t entry) {
    int64_t block = entry / BLOCK;
    const char *words = bits.words;
    if (bits.patch != NULL && bits.patch[block] >= 0) {
        words = bits.patches;
        block = bits.patch[block];
    }
    uint64_t w;
    memcpy(&w, words + block * (BLOCK / 8) + entry % BLOCK / 8, sizeof w);
    w = (w & 0x0f0f0f0f0f0f0f0f) << 4 | (w >> 4 & 0x0f0f0f0f0f0f0f0f);
    w = (w & 0x3333333333333333) << 2 | (w >> 2 & 0x3333333333333333);
    return (w & 0x5555555555555555) << 1 | (w >> 1 & 0x5555555555555555);
}

/* ---- up to 64 entries ------------------------------------------------------------------------ */

INLINE void compact_some(uint64_t w, char *flat, char *out, int size, int clear) {
    for (; w; w &= w - 1) {
        char *entry = flat + __builtin_ctzll(w) * size;
        if (out != NULL) {
            memcpy(out, entry, size);
            out += size;
        }
        if (clear) memset(entry, 0, size);
    }
}

INLINE void expand_some(uint64_t w, const char *values, char *out, int size) {
    for (; w; w &= w - 1, values += size) memcpy(out + __builtin_ctzll(w) * size, values, size);
}

/* ---- 64 entries with room for as many values, by AVX-512: 16 at a time, as 32-bit integers --- */

AVX512 INLINE __m512i load_16(const char *from, int size) {
    if (size == 4) return _mm512_loadu_si512(from);
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

AVX512 INLINE void store_16(char *to, __m512i entries, int size) {
    if (size == 4)
        _mm512_storeu_si512(to, entries);
    else
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(entries));
}

AVX512 INLINE void compact_64_avx512(uint64_t w, char *flat, char *out, int size, int clear) {
    for (int i = 0; i < GROUP; i += 16, w >>= 16, flat += 16 * size) {
        __mmask16 mask = (__mmask16)w;
        __m512i entries = load_16(flat, size);
        if (out != NULL) {
            /* What is written too much is overwritten by the values that follow. */
            store_16(out, _mm512_maskz_compress_epi32(mask, entries), size);
            out += __builtin_popcount(mask) * size;
        }
        if (clear) store_16(flat, _mm512_maskz_mov_epi32(~mask, entries), size);
    }
}

AVX512 INLINE void expand_64_avx512(uint64_t w, const char *values, char *out, int size,
                                    int zeros, float scale) {
    __m512 times = _mm512_set1_ps(scale);
    for (int i = 0; i < GROUP; i += 16, w >>= 16, out += 16 * size) {
        __mmask16 mask = (__mmask16)w;
        __m512i some = load_16(values, size);
        /* Else compilers make this load a part of the expansion, which takes twice as long. */
        __asm__("" : "+v"(some));
        if (!zeros)
            some = _mm512_mask_expand_epi32(load_16(out, size), mask, some);
        else
            some = _mm512_maskz_expand_epi32(mask, some);
        if (scale != 1)
            some = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(some), times));
        store_16(out, some, size);
        values += __builtin_popcount(mask) * size;
    }
}

/* ---- the same by AVX2: 8 at a time ----------------------------------------------------------- */

/* AVX2 moves entries across a vector only by a vector of indices, which these tables give for each
 * byte of a bitmap, the first entry in its lowest bit. A byte of a row is an index. */
static uint64_t chosen_first[256]; /* of the chosen entries, in order; then 0 */
static uint64_t chosen_before[256]; /* of each entry: how many are chosen before it */

__attribute__((constructor)) static void fill_tables(void) {
    for (int byte = 0; byte < 256; byte++) {
        int before = 0;
        for (uint64_t i = 0; i < 8; i++) {
            chosen_before[byte] |= (uint64_t)before << 8 * i;
            if (byte >> i & 1) chosen_first[byte] |= i << 8 * before++;
        }
    }
}

AVX2 INLINE __m256i row_of(const uint64_t *table, int byte) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(table + byte)));
}

/* All ones where an entry is chosen. */
AVX2 INLINE __m256i mask_of(int byte) {
    __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(byte), bits), bits);
}

AVX2 INLINE __m256i load_8(const char *from, int size) {
    if (size == 4) return _mm256_loadu_si256((const __m256i *)from);
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

AVX2 INLINE void store_8(char *to, __m256i entries, int size) {
    if (size == 4)
        _mm256_storeu_si256((__m256i *)to, entries);
    else
        _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(entries),
                                                         _mm256_extracti128_si256(entries, 1)));
}

AVX2 INLINE void compact_64_avx2(uint64_t w, char *flat, char *out, int size, int clear) {
    /* Two pages ahead, because the processor's own prefetching stops at the end of a page. An
     * address beyond the tensor does no harm. */
    for (int i = 0; i < GROUP * size; i += 64) __builtin_prefetch(flat + 8192 + i);
    for (int i = 0; i < GROUP; i += 8, w >>= 8, flat += 8 * size) {
        int byte = w & 0xff;
        __m256i entries = load_8(flat, size);
        if (out != NULL) {
            /* The values that follow overwrite what is written beyond the chosen entries. */
            store_8(out, _mm256_permutevar8x32_epi32(entries, row_of(chosen_first, byte)), size);
            out += __builtin_popcount(byte) * size;
        }
        if (clear) store_8(flat, _mm256_andnot_si256(mask_of(byte), entries), size);
    }
}

AVX2 INLINE void expand_64_avx2(uint64_t w, const char *values, char *out, int size, int zeros,
                                float scale) {
    __m256 times = _mm256_set1_ps(scale);
    for (int i = 0; i < GROUP; i += 8, w >>= 8, out += 8 * size) {
        int byte = w & 0xff;
        __m256i mask = mask_of(byte), some = load_8(values, size);
        some = _mm256_permutevar8x32_epi32(some, row_of(chosen_before, byte));
        if (zeros)
            some = _mm256_and_si256(some, mask);
        else
            some = _mm256_blendv_epi8(load_8(out, size), some, mask);
        if (scale != 1)
            some = _mm256_castps_si256(_mm256_mul_ps(_mm256_castsi256_ps(some), times));
        store_8(out, some, size);
        values += __builtin_popcount(byte) * size;
    }
}

/* ---- AdamW of the chosen entries of 64, and decay of the weights of all of them -------------- */

/* Constants of a step, as torch's fused kernel computes them, and the factors of the number of
 * steps that was met last. */
typedef struct {
    float factor, rest1, beta2, rest2, shrink, step_size, root_bias2, eps;
    float before; /* what of a gradient is added to the first moment before it decays */
    double beta2_exact;
    float steps, aged, root;
} AdamW;

/* Let `with` hold the factors of this number of steps: `accumulation_factors` of
 * `update_rules.py`. */
INLINE void take_factors(AdamW *with, float steps) {
    if (with->steps == steps) return;
    double beta2 = with->beta2_exact, aged = 1, power = beta2;
    for (int64_t n = (int64_t)steps - 1; n > 0; n >>= 1, power *= power)
        if (n & 1) aged *= power;
    double share = (1 - beta2 * aged) / (steps * (1 - beta2));
    with->steps = steps;
    with->aged = (float)aged;
    with->root = (float)_mm_cvtsd_f64(_mm_sqrt_sd(_mm_set_sd(0), _mm_set_sd(share)));
}

AVX512 INLINE void adamw_64_avx512(uint64_t w, const float *values, const float *steps,
                                   float *weight, float *exp_avg, float *exp_avg_sq,
                                   AdamW *with) {
    for (int i = 0; i < GROUP; i += 16, w >>= 16) {
        __mmask16 mask = (__mmask16)w;
        __m512 old = _mm512_mul_ps(_mm512_loadu_ps(weight + i), _mm512_set1_ps(with->shrink));
        if (!mask) {
            if (with->shrink != 1) _mm512_storeu_ps(weight + i, old);
            continue;
        }
        __m512 mean = _mm512_loadu_ps(exp_avg + i), square = _mm512_loadu_ps(exp_avg_sq + i);
        __m512 some = _mm512_loadu_ps(values);
        __asm__("" : "+v"(some)); /* as above */
        __m512 grad = _mm512_mul_ps(_mm512_maskz_expand_ps(mask, some),
                                    _mm512_set1_ps(with->factor));
        if (steps != NULL) {
            __m512 counts = _mm512_loadu_ps(steps);
            __asm__("" : "+v"(counts));
            counts = _mm512_mask_expand_ps(_mm512_set1_ps(1), mask, counts);
            __mmask16 summed = _mm512_cmp_ps_mask(counts, _mm512_set1_ps(1), _CMP_NEQ_OQ);
            __m512 sum = grad;
            while (summed) {
                take_factors(with, _mm512_cvtss_f32(_mm512_maskz_compress_ps(summed, counts)));
                __mmask16 alike = _mm512_mask_cmp_ps_mask(
                    summed, counts, _mm512_set1_ps(with->steps), _CMP_EQ_OQ);
                square = _mm512_mask_mul_ps(square, alike, square, _mm512_set1_ps(with->aged));
                __m512 part = _mm512_mul_ps(_mm512_set1_ps(with->before), sum);
                mean = _mm512_mask3_fmadd_ps(part, _mm512_set1_ps(1 - with->root), mean, alike);
                grad = _mm512_mask_mul_ps(grad, alike, sum, _mm512_set1_ps(with->root));
                summed &= ~alike;
            }
            steps += __builtin_popcount(mask);
        }
        values += __builtin_popcount(mask);
        mean = _mm512_fmadd_ps(_mm512_set1_ps(with->rest1), _mm512_sub_ps(grad, mean), mean);
        __m512 brought = _mm512_mul_ps(_mm512_set1_ps(with->rest2), grad);
        square = _mm512_mul_ps(square, _mm512_set1_ps(with->beta2));
        square = _mm512_fmadd_ps(brought, grad, square);
        __m512 root = _mm512_div_ps(_mm512_sqrt_ps(square), _mm512_set1_ps(with->root_bias2));
        __m512 scale = _mm512_add_ps(root, _mm512_set1_ps(with->eps));
        __m512 step = _mm512_mul_ps(_mm512_set1_ps(-with->step_size), mean);
        _mm512_mask_storeu_ps(exp_avg + i, mask, mean);
        _mm512_mask_storeu_ps(exp_avg_sq + i, mask, square);
        _mm512_storeu_ps(weight + i, _mm512_mask_add_ps(old, mask, old,
                                                        _mm512_div_ps(step, scale)));
    }
}

AVX2 INLINE void adamw_64_avx2(uint64_t w, const float *values, const float *steps, float *weight,
                               float *exp_avg, float *exp_avg_sq, AdamW *with) {
    for (int i = 0; i < GROUP; i += 8, w >>= 8) {
        int byte = w & 0xff, chosen = __builtin_popcount(byte);
        __m256 old = _mm256_mul_ps(_mm256_loadu_ps(weight + i), _mm256_set1_ps(with->shrink));
        if (!byte) {
            if (with->shrink != 1) _mm256_storeu_ps(weight + i, old);
            continue;
        }
        __m256 mask = _mm256_castsi256_ps(mask_of(byte));
        __m256i before = row_of(chosen_before, byte);
        __m256 mean = _mm256_loadu_ps(exp_avg + i), square = _mm256_loadu_ps(exp_avg_sq + i);
        __m256 old_mean = mean, old_square = square;
        __m256 grad = _mm256_mul_ps(_mm256_permutevar8x32_ps(_mm256_loadu_ps(values), before),
                                    _mm256_set1_ps(with->factor));
        if (steps != NULL) {
            __m256 one = _mm256_set1_ps(1), sum = grad;
            __m256 counts = _mm256_permutevar8x32_ps(_mm256_loadu_ps(steps), before);
            __m256 other = _mm256_cmp_ps(counts, one, _CMP_NEQ_OQ);
            int summed = _mm256_movemask_ps(_mm256_and_ps(other, mask));
            while (summed) {
                float each[8];
                _mm256_storeu_ps(each, counts);
                take_factors(with, each[__builtin_ctz(summed)]);
                __m256 alike = _mm256_cmp_ps(counts, _mm256_set1_ps(with->steps), _CMP_EQ_OQ);
                __m256 aged = _mm256_mul_ps(square, _mm256_set1_ps(with->aged));
                __m256 part = _mm256_mul_ps(_mm256_set1_ps(with->before), sum);
                __m256 more = _mm256_fmadd_ps(part, _mm256_set1_ps(1 - with->root), mean);
                __m256 less = _mm256_mul_ps(sum, _mm256_set1_ps(with->root));
                square = _mm256_blendv_ps(square, aged, alike);
                mean = _mm256_blendv_ps(mean, more, alike);
                grad = _mm256_blendv_ps(grad, less, alike);
                int done = _mm256_movemask_ps(alike);
                summed &= ~done;
            }
            steps += chosen;
        }
        values += chosen;
        mean = _mm256_fmadd_ps(_mm256_set1_ps(with->rest1), _mm256_sub_ps(grad, mean), mean);
        __m256 brought = _mm256_mul_ps(_mm256_set1_ps(with->rest2), grad);
        square = _mm256_mul_ps(square, _mm256_set1_ps(with->beta2));
        square = _mm256_fmadd_ps(brought, grad, square);
        __m256 root = _mm256_div_ps(_mm256_sqrt_ps(square), _mm256_set1_ps(with->root_bias2));
        __m256 scale = _mm256_add_ps(root, _mm256_set1_ps(with->eps));
        __m256 step = _mm256_mul_ps(_mm256_set1_ps(-with->step_size), mean);
        __m256 new = _mm256_add_ps(old, _mm256_div_ps(step, scale));
        _mm256_storeu_ps(exp_avg + i, _mm256_blendv_ps(old_mean, mean, mask));
        _mm256_storeu_ps(exp_avg_sq + i, _mm256_blendv_ps(old_square, square, mask));
        _mm256_storeu_ps(weight + i, _mm256_blendv_ps(old, new, mask));
    }
}

/* ---- all of a tensor ------------------------------------------------------------------------- */

/* Each instruction set's function inlines these, and with them the kernel that is a constant there.
 */
typedef void Compact64(uint64_t w, char *flat, char *out, int size, int clear);
typedef void Expand64(uint64_t w, const char *values, char *out, int size, int zeros, float scale);
typedef void AdamW64(uint64_t w, const float *values, const float *steps, float *weight,
                     float *exp_avg, float *exp_avg_sq, AdamW *with);

INLINE int64_t compact_all(Compact64 *compact_64, Bitmap bits, char *flat, int64_t length,
                           char *out, int64_t count, int size, int clear) {
    int64_t done = 0;
    for (int64_t i = 0; i < length; i += GROUP) {
        uint64_t w = chosen(bits, i);
        int64_t left = length - i, some = __builtin_popcountll(w);
        if (done + some > count || (left < GROUP && w >> left)) return -1;
        char *from = flat + i * size, *to = out == NULL ? NULL : out + done * size;
        if (left >= GROUP && done + GROUP <= count)
            compact_64(w, from, to, size, clear);
        else
            compact_some(w, from, to, size, clear);
        done += some;
    }
    return done;
}

INLINE int64_t expand_all(Expand64 *expand_64, Bitmap bits, int64_t first, const char *values,
                          int64_t count, char *out, int64_t length, int size, int zeros,
                          float scale) {
    int64_t done = 0;
    for (int64_t i = 0; i < length; i += GROUP) {
        uint64_t w = chosen(bits, first + i);
        int64_t left = length - i;
        if (left < GROUP) w &= ((uint64_t)1 << left) - 1;
        int64_t some = __builtin_popcountll(w);
        if (done + some > count) return -1;
        const char *from = values + done * size;
        char *to = out + i * size;
        if (left >= GROUP && done + GROUP <= count) {
            expand_64(w, from, to, size, zeros, scale);
        } else {
            int64_t room = left < GROUP ? left : GROUP;
            if (zeros) memset(to, 0, room * size);
            expand_some(w, from, to, size);
            if (scale != 1)
                for (float *each = (float *)to; each < (float *)to + room; each++) *each *= scale;
        }
        done += some;
    }
    return done;
}

/* The first `some` of 64 floats, which may be all that there are. */
INLINE void copy_some(float *to, const float *from, int64_t some) {
    memcpy(to, from, some * sizeof *from);
}

INLINE int64_t adamw_all(AdamW64 *adamw_64, Bitmap bits, const float *values, const float *steps,
                         int64_t count, float *weight, float *exp_avg, float *exp_avg_sq,
                         int64_t length, AdamW *with) {
    int64_t done = 0;
    for (int64_t i = 0; i < length; i += GROUP) {
        uint64_t w = chosen(bits, i);
        int64_t left = length - i, some = __builtin_popcountll(w);
        if (done + some > count || (left < GROUP && w >> left)) return -1;
        float last_values[GROUP], last_steps[GROUP], last_states[3][GROUP];
        const float *mine = values + done, *of_mine = steps == NULL ? NULL : steps + done;
        if (done + GROUP > count) {
            copy_some(last_values, mine, some);
            if (steps != NULL) copy_some(last_steps, of_mine, some);
            mine = last_values;
            of_mine = steps == NULL ? NULL : last_steps;
        }
        float *states[3] = {weight + i, exp_avg + i, exp_avg_sq + i};
        if (left >= GROUP) {
            adamw_64(w, mine, of_mine, states[0], states[1], states[2], with);
        } else {
            for (int s = 0; s < 3; s++) copy_some(last_states[s], states[s], left);
            adamw_64(w, mine, of_mine, last_states[0], last_states[1], last_states[2], with);
            for (int s = 0; s < 3; s++) copy_some(states[s], last_states[s], left);
        }
        done += some;
    }
    return done;
}

/* ---- by instruction set ---------------------------------------------------------------------- */

#define KERNELS(TARGET, set)                                                                       \
    TARGET static int64_t compact_##set(Bitmap bits, char *flat, int64_t length, char *out,        \
                                        int64_t count, int size, int clear) {                      \
        if (size == 2)                                                                             \
            return compact_all(compact_64_##set, bits, flat, length, out, count, 2, clear);        \
        return compact_all(compact_64_##set, bits, flat, length, out, count, 4, clear);            \
    }                                                                                              \
    TARGET static int64_t expand_##set(Bitmap bits, int64_t first, const char *values,             \
                                       int64_t count, char *out, int64_t length, int size,         \
                                       int zeros, float scale) {                                   \
        if (size == 2)                                                                             \
            return expand_all(expand_64_##set, bits, first, values, count, out, length, 2, zeros,  \
                              1);                                                                  \
        return expand_all(expand_64_##set, bits, first, values, count, out, length, 4, zeros,      \
                          scale);                                                                  \
    }                                                                                              \
    TARGET static int64_t adamw_##set(Bitmap bits, const float *values, const float *steps,        \
                                      int64_t count, float *weight, float *exp_avg,                \
                                      float *exp_avg_sq, int64_t length, AdamW *with) {            \
        return adamw_all(adamw_64_##set, bits, values, steps, count, weight, exp_avg, exp_avg_sq,  \
                         length, with);                                                            \
    }

KERNELS(AVX2, avx2)
KERNELS(AVX512, avx512)

/* ---- what `native.py` calls ------------------------------------------------------------------ */

int sparsetron_version(void) { return VERSION; }

/* The best instruction set that this processor has; without any, nothing below may be called. */
int sparsetron_instruction_set(void) {
    if (!__builtin_cpu_supports("popcnt") || !__builtin_cpu_supports("avx2")) return NO_SET;
    if (!__builtin_cpu_supports("fma")) return NO_SET;
    return __builtin_cpu_supports("avx512f") ? SET_AVX512 : SET_AVX2;
}

/* Write the chosen ones of `length` entries of `size` bytes, 2 or 4, to `out`, unless that is NULL,
 * and zeros in their places if told to `clear`. How many they are; -1, with some of it done, where
 * they are more than `count`, or one of the last 64 lies beyond the length. */
int64_t sparsetron_compact(int set, const char *words, const int32_t *patch, const char *patches,
                           char *flat, int64_t length, char *out, int64_t count, int size,
                           int clear) {
    Bitmap bits = {words, patch, patches};
    if (set == SET_AVX512) return compact_avx512(bits, flat, length, out, count, size, clear);
    return compact_avx2(bits, flat, length, out, count, size, clear);
}

/* Place values at the chosen ones of `length` entries, of which the first is entry `first` of the
 * bitmap; the others stay, or become 0 with `zeros`. A `scale` other than 1 multiplies them all,
 * which must be floats then. How many were placed; -1, with some of it done, where that would be
 * more than `count`. */
int64_t sparsetron_expand(int set, const char *words, const int32_t *patch, const char *patches,
                          int64_t first, const char *values, int64_t count, char *out,
                          int64_t length, int size, int zeros, float scale) {
    Bitmap bits = {words, patch, patches};
    if (set == SET_AVX512)
        return expand_avx512(bits, first, values, count, out, length, size, zeros, scale);
    return expand_avx2(bits, first, values, count, out, length, size, zeros, scale);
}

/* Update the chosen ones of `length` entries by AdamW, and decay the weights of all of them.
 * `values` times `factor` are the gradients, and each sums as many steps as `steps` says, if that is
 * not NULL. How many were updated; -1, with some of it done, where that would be more than `count`,
 * or one of the last 64 lies beyond the length. */
int64_t sparsetron_adamw(int set, const char *words, const int32_t *patch, const char *patches,
                         const float *values, const float *steps, int64_t count, float *weight,
                         float *exp_avg, float *exp_avg_sq, int64_t length, double factor,
                         double beta1, double beta2, double shrink, double step_size,
                         double root_bias2, double eps) {
    Bitmap bits = {words, patch, patches};
    AdamW with = {
        .factor = factor, .rest1 = 1 - beta1, .beta2 = beta2, .rest2 = 1 - beta2,
        .shrink = shrink, .step_size = step_size, .root_bias2 = root_bias2, .eps = eps,
        .before = (1 - beta1) / beta1, .beta2_exact = beta2, .steps = 1, .aged = 1, .root = 1,
    };
    if (set == SET_AVX512)
        return adamw_avx512(bits, values, steps, count, weight, exp_avg, exp_avg_sq, length, &with);
    return adamw_avx2(bits, values, steps, count, weight, exp_avg, exp_avg_sq, length, &with);
}

/* How many bits are set in each of so many blocks. */
__attribute__((target("popcnt"))) void sparsetron_count(const char *words, int64_t blocks, int64_t *counts) {
    for (int64_t block = 0; block < blocks; block++) {
        counts[block] = 0;
        for (int i = 0; i < BLOCK / 8; i += 8) {
            uint64_t w;
            memcpy(&w, words + block * (BLOCK / 8) + i, sizeof w);
            counts[block] += __builtin_popcountll(w);
        }
    }
}
