/* NVFP4 quantization of one block, as docs/spec.md has it: what this folder's two programs hold to the vectors.
 * Compile without -ffast-math and with -ffp-contract=off: one operation, one rounding. */
#ifndef NVFP4_BLOCK_H
#define NVFP4_BLOCK_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* NAN-CANONICAL: a computed NaN is 0x7FFFFFFF. */
static inline uint32_t as_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7FFFFFFFu : bits;
}

/* E2M1-RNE, E2M1-SATURATE, E2M1-NAN, E2M1-ZERO */
static inline unsigned e2m1(float x)
{
    static const float middle[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    const float magnitude = fabsf(x);
    unsigned code = 0, i;
    if (x != x)
        return 7;
    for (i = 0; i < 7; i++) /* a tie goes to the even code: up from an odd one */
        code += i % 2 ? magnitude >= middle[i] : magnitude > middle[i];
    return code | (signbit(x) ? 8u : 0u);
}

/* E4M3-RNE, E4M3-SATURATE, E4M3-NAN */
static inline unsigned e4m3(float x)
{
    const float magnitude = fabsf(x);
    const unsigned sign = signbit(x) ? 0x80u : 0u;
    uint32_t u;
    if (x != x)
        return 0x7F;
    if (magnitude > 448.0f)
        return sign | 0x7E;
    if (magnitude < 0.015625f)
        return sign | (unsigned)rintf(magnitude * 512.0f);
    u = as_bits(magnitude);
    u = ((u + 0x0007FFFFu + (u >> 20 & 1u)) >> 20) - 0x3C0u;
    return sign | (u > 0x7E ? 0x7Eu : u);
}

/* E4M3-VALUES */
static inline float e4m3_value(unsigned byte)
{
    const int exponent = (int)(byte >> 3 & 15), mantissa = (int)(byte & 7);
    const float magnitude =
        exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
    if ((byte & 0x7F) == 0x7F)
        return as_float(0x7FFFFFFFu);
    return byte & 0x80 ? -magnitude : magnitude;
}

/* SCALE-GLOBAL, SCALE-GLOBAL-GUARD */
static inline float global_scale(float amax)
{
    const float scale = fminf(2688.0f / amax, FLT_MAX);
    return amax == 0.0f || scale == 0.0f ? 1.0f : scale;
}

/* SCALE-BLOCK: before its conversion to E4M3 */
static inline float block_scale(float amax, float scale)
{
    const float sixth = scale * (1.0f / 6.0f);
    return fminf(amax * sixth, FLT_MAX);
}

/* SCALE-ENCODE, with D = fl(1/S) of SCALE-DECODE */
static inline float encode_scale(unsigned byte, float scale)
{
    const float decode = 1.0f / scale, product = e4m3_value(byte) * decode;
    return fminf(1.0f / product, FLT_MAX);
}

/* BLOCK-AMAX: NaN is ignored */
static inline float block_amax(const float x[16])
{
    float amax = 0.0f;
    int i;
    for (i = 0; i < 16; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    return amax;
}

/* The whole block: its scale byte, and the packed codes of E2M1-PACK */
static inline unsigned quantize_block(const float x[16], float scale, unsigned char packed[8])
{
    const unsigned byte = e4m3(block_scale(block_amax(x), scale));
    const float e = encode_scale(byte, scale);
    int i;
    for (i = 0; i < 8; i++)
        packed[i] = (unsigned char)(e2m1(x[2 * i] * e) | e2m1(x[2 * i + 1] * e) << 4);
    return byte;
}

#endif
