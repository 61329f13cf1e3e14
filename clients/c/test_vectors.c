/* The test of the reader, and an example of its use: this folder's own quantizer held to the exported vectors.
 *     test_vectors DIR        exit 0: every result right, 1: some wrong, 2: the vectors cannot be read
 */
#include <stdio.h>

#include "nvfp4_block.h"
#include "nvfp4_vectors.h"

static size_t checked, wrong;

static void compare(const char *rule, size_t row, uint64_t found, uint64_t expected)
{
    checked++;
    if (found != expected && wrong++ < 5)
        printf("%s row %lu: found %llX, expected %llX\n", rule, (unsigned long)row, (unsigned long long)found,
               (unsigned long long)expected);
}

/* One float in, one code out: set 0 of these rules. */
static int codes(const nvfp4_vectors *v, const char *rule, const char *result, unsigned (*encode)(float))
{
    const nvfp4_array *x = nvfp4_find(v, rule, 0, "x"), *expected = nvfp4_find(v, rule, 0, result);
    size_t row;
    if (!x || !expected)
        return 0;
    for (row = 0; row < x->rows; row++)
        compare(rule, row, encode(as_float((uint32_t)nvfp4_value(x, row, 0))), nvfp4_value(expected, row, 0));
    return 1;
}

/* Sixteen floats and an amax in, a scale byte and eight packed bytes out. */
static int blocks(const nvfp4_vectors *v, const char *rule, int set)
{
    const nvfp4_array *x = nvfp4_find(v, rule, set, "x"), *amax = nvfp4_find(v, rule, set, "amax");
    const nvfp4_array *byte = nvfp4_find(v, rule, set, "byte"), *packed = nvfp4_find(v, rule, set, "packed");
    size_t row, i;
    if (!x || !amax || !byte || !packed)
        return 0;
    for (row = 0; row < x->rows; row++) {
        float block[16];
        unsigned char codes[8];
        for (i = 0; i < 16; i++)
            block[i] = as_float((uint32_t)nvfp4_value(x, row, i));
        compare(rule, row, quantize_block(block, global_scale(as_float((uint32_t)nvfp4_value(amax, row, 0))), codes),
                nvfp4_value(byte, row, 0));
        for (i = 0; i < 8; i++)
            compare(rule, row, codes[i], nvfp4_value(packed, row, i));
    }
    return 1;
}

int main(int argc, char **argv)
{
    static const char *const e2m1_rules[] = {"E2M1-RNE", "E2M1-SATURATE", "E2M1-NAN", "E2M1-ZERO"};
    static const char *const e4m3_rules[] = {"E4M3-RNE", "E4M3-SATURATE", "E4M3-NAN"};
    nvfp4_vectors v;
    int found = 0;
    size_t i;
    if (argc != 2) {
        fprintf(stderr, "usage: %s DIR, a folder that nvfp4 vectors export wrote\n", argv[0]);
        return 2;
    }
    if (nvfp4_open(&v, argv[1])) {
        fprintf(stderr, "%s\n", v.error);
        nvfp4_close(&v);
        return 2;
    }
    for (i = 0; i < 4; i++)
        found += codes(&v, e2m1_rules[i], "code", e2m1);
    for (i = 0; i < 3; i++)
        found += codes(&v, e4m3_rules[i], "byte", e4m3);
    found += blocks(&v, "SCALE-BLOCK", 2) + blocks(&v, "SCALE-ZERO-BLOCK", 0) + blocks(&v, "ELEMENT-SCALE", 1);
    printf("specification %s: %lu results of %d sets, %lu wrong\n", v.spec, (unsigned long)checked, found,
           (unsigned long)wrong);
    nvfp4_close(&v);
    return found ? wrong > 0 : 2;
}
