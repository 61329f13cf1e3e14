/* A device under test for the pipe:  nvfp4 vectors generate | ./dut | nvfp4 vectors verify
 * It answers the operations of a plain quantizer and declines the others with "-".  docs/pipe.md has the protocol.
 */
#include <stdio.h>
#include <stdlib.h>

#include "nvfp4_block.h"

#define LONGEST 2048

static char *rest; /* of the line, behind what was read */

/* The next operand: n values of some hexadecimal digits, in one word. */
static void read_values(uint32_t *values, int n, int digits)
{
    char word[9] = "";
    int i;
    while (*rest == ' ')
        rest++;
    for (i = 0; i < n; i++) {
        memcpy(word, rest, (size_t)digits);
        values[i] = (uint32_t)strtoul(word, NULL, 16);
        rest += digits;
    }
}

static uint32_t read_one(int digits)
{
    uint32_t value;
    read_values(&value, 1, digits);
    return value;
}

static void read_floats(float *x, int n)
{
    uint32_t bits[16];
    int i;
    read_values(bits, n, 8);
    for (i = 0; i < n; i++)
        x[i] = as_float(bits[i]);
}

static void answer(const char *operation)
{
    float x[16], a, b;
    uint32_t bits[16];
    unsigned char packed[8];
    int i;
    if (!strcmp(operation, "e2m1")) {
        printf(" %X\n", e2m1(as_float(read_one(8))));
    } else if (!strcmp(operation, "e4m3")) {
        printf(" %02X\n", e4m3(as_float(read_one(8))));
    } else if (!strcmp(operation, "e4m3-decode")) {
        printf(" %08lX\n", (unsigned long)as_bits(e4m3_value(read_one(2))));
    } else if (!strcmp(operation, "e2m1-pack")) {
        read_values(bits, 16, 1);
        printf(" ");
        for (i = 0; i < 8; i++)
            printf("%02X", (unsigned)(bits[2 * i] | bits[2 * i + 1] << 4));
        printf("\n");
    } else if (!strcmp(operation, "multiply") || !strcmp(operation, "divide")) {
        a = as_float(read_one(8));
        b = as_float(read_one(8));
        printf(" %08lX\n", (unsigned long)as_bits(operation[0] == 'm' ? a * b : a / b));
    } else if (!strcmp(operation, "block-amax")) {
        read_floats(x, 16);
        printf(" %08lX\n", (unsigned long)as_bits(block_amax(x)));
    } else if (!strcmp(operation, "global-scale")) {
        a = global_scale(as_float(read_one(8)));
        printf(" %08lX %08lX\n", (unsigned long)as_bits(a), (unsigned long)as_bits(1.0f / a));
    } else if (!strcmp(operation, "block-scale")) {
        a = as_float(read_one(8));
        b = block_scale(a, as_float(read_one(8)));
        printf(" %08lX %02X\n", (unsigned long)as_bits(b), e4m3(b));
    } else if (!strcmp(operation, "encode-scale")) {
        bits[0] = read_one(2);
        printf(" %08lX\n", (unsigned long)as_bits(encode_scale(bits[0], as_float(read_one(8)))));
    } else if (!strcmp(operation, "element")) {
        a = as_float(read_one(8));
        a *= as_float(read_one(8));
        printf(" %08lX %X\n", (unsigned long)as_bits(a), e2m1(a));
    } else if (!strcmp(operation, "block") || !strcmp(operation, "quantize")) {
        read_floats(x, 16);
        a = as_float(read_one(8));
        printf(" %02X ", quantize_block(x, operation[0] == 'q' ? global_scale(a) : a, packed));
        for (i = 0; i < 8; i++)
            printf("%02X", packed[i]);
        printf("\n");
    } else {
        printf(" -\n");
    }
}

int main(void)
{
    char line[LONGEST + 128], operation[64]; /* zeros follow a line, so that a short one is not read past its end */
    int behind;
    while (memset(line, 0, sizeof line), fgets(line, LONGEST, stdin)) {
        line[strcspn(line, "\r\n")] = '\0';
        fputs(line, stdout);
        behind = 0;
        if (line[0] == '#' || sscanf(line, "%*[0-9] %63s%n", operation, &behind) != 1) {
            putchar('\n'); /* comments, the beginning and the end pass through */
            continue;
        }
        rest = line + behind;
        answer(operation);
    }
    return ferror(stdin) || fflush(stdout) ? 1 : 0;
}
