/* Reads the vectors that `nvfp4 vectors export DIR` wrote.  C99, no library; see docs/vectors.md. */
#ifndef NVFP4_VECTORS_H
#define NVFP4_VECTORS_H

#include <stddef.h>
#include <stdint.h>

/* One array: an operand or a result of one set of one rule. */
typedef struct {
    char rule[64], operation[64], role[16], name[32], type[8];
    int set;              /* number of the set in its rule, from 0 */
    size_t rows, columns; /* columns is 1 for one value a row */
    size_t width;         /* bytes of a value: 1, 2, 4 or 8 */
    const unsigned char *bytes;
} nvfp4_array;

typedef struct {
    nvfp4_array *arrays;
    size_t count;
    unsigned char **files; /* the data of each rule */
    size_t file_count;
    char spec[16], error[256]; /* version of the specification; what went wrong */
} nvfp4_vectors;

/* 0, or -1 with a sentence in v->error.  Close it in either case. */
int nvfp4_open(nvfp4_vectors *v, const char *folder);
void nvfp4_close(nvfp4_vectors *v);

/* The array of a rule's set, NULL when there is none. */
const nvfp4_array *nvfp4_find(const nvfp4_vectors *v, const char *rule, int set, const char *name);

/* The bits of a value. */
uint64_t nvfp4_value(const nvfp4_array *array, size_t row, size_t column);

#endif
