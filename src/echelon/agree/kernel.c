/* Exact sums in one pass over memory: what grid.py does in five, to the same bits.
 *
 * No Python in here: kernel.py calls it through ctypes, and trains without it where it could not be compiled.
 */
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__) && defined(__gnu_linux__)
#define FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FAST
#endif

static inline uint32_t magnitude(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffffu;
}

/* To the nearest integer, ties to even: from 2^23 on a float is one; below, adding 2^23 leaves it no other bits. */
static inline float nearest(float x) {
    const float shift = 8388608.0f;
    float size = __builtin_fabsf(x);
    float whole = (size + shift) - shift;
    return __builtin_copysignf(size < shift ? whole : size, x);
}

/* Add `n` values, times `scale` and rounded, to `total`, or start it with them. Returns the bits of the largest
 * magnitude among the values themselves; as unsigned integers, those of NaN are above infinity and all numbers. */
FAST static uint32_t add(const float *values, double *total, int64_t n, float scale, int first) {
    uint32_t largest = 0;
    if (first) {
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = magnitude(values[i]);
            largest = bits > largest ? bits : largest;
            total[i] = (double)nearest(values[i] * scale);
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits = magnitude(values[i]);
            largest = bits > largest ? bits : largest;
            total[i] += (double)nearest(values[i] * scale);
        }
    }
    return largest;
}

/* The same for `count` arrays in a row. One that is missing is all zeros. */
uint32_t echelon_add_to_grid(int64_t count, const float *const *arrays, const int64_t *sizes, double *total,
                             float scale, int first) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        if (arrays[i]) {
            uint32_t bits = add(arrays[i], total, sizes[i], scale, first);
            largest = bits > largest ? bits : largest;
        } else if (first) {
            memset(total, 0, (size_t)sizes[i] * sizeof *total);
        }
        total += sizes[i];
    }
    return largest;
}

/* The mean: rounded to single precision, no zero negative, scaled back and divided by the weight. */
FAST void echelon_from_grid(const double *total, float *into, int64_t n, float scale, float weight) {
    for (int64_t i = 0; i < n; i++) {
        into[i] = ((float)total[i] + 0.0f) * scale / weight;
    }
}
