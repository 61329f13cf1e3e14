#include "nvfp4_vectors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t width_of(const char *type) /* "bf16" has 2 bytes; "u8" and the codes have one */
{
    return strstr(type, "16") ? 2 : strstr(type, "32") ? 4 : strstr(type, "64") ? 8 : 1;
}

static int fail(nvfp4_vectors *v, const char *what, const char *subject)
{
    snprintf(v->error, sizeof v->error, "%s: %.180s", what, subject);
    return -1;
}

/* The whole of DIR/RULE.bin; NULL when it cannot be read. */
static unsigned char *slurp(nvfp4_vectors *v, const char *folder, const char *rule, size_t *size)
{
    char path[4096];
    unsigned char *data = NULL, **files;
    long end;
    FILE *file;
    if (snprintf(path, sizeof path, "%s/%s.bin", folder, rule) >= (int)sizeof path || !(file = fopen(path, "rb")))
        return NULL;
    if (!fseek(file, 0, SEEK_END) && (end = ftell(file)) >= 0 && !fseek(file, 0, SEEK_SET)) {
        *size = (size_t)end;
        data = (unsigned char *)malloc(*size + 1);
        if (data && fread(data, 1, *size, file) != *size)
            free(data), data = NULL;
    }
    fclose(file);
    files = data ? (unsigned char **)realloc(v->files, (v->file_count + 1) * sizeof *files) : NULL;
    if (!files) {
        free(data);
        return NULL;
    }
    v->files = files;
    return v->files[v->file_count++] = data;
}

int nvfp4_open(nvfp4_vectors *v, const char *folder)
{
    char path[4096], line[512], last[64] = "";
    unsigned char *data = NULL;
    size_t size = 0;
    FILE *index;
    memset(v, 0, sizeof *v);
    if (snprintf(path, sizeof path, "%s/index.txt", folder) >= (int)sizeof path || !(index = fopen(path, "r")))
        return fail(v, "cannot open index.txt of", folder);
    if (!fgets(line, sizeof line, index) || sscanf(line, "# nvfp4-vectors 1 spec %15s", v->spec) != 1) {
        fclose(index);
        return fail(v, "not vectors of format 1", path);
    }
    while (fgets(line, sizeof line, index)) {
        nvfp4_array a, *arrays;
        unsigned long rows, columns, offset;
        if (sscanf(line, "%63s %d %63s %15s %31s %7s %lu %lu %lu", a.rule, &a.set, a.operation, a.role, a.name, a.type,
                   &rows, &columns, &offset) != 9 || !rows || !columns) {
            fclose(index);
            return fail(v, "index.txt has a line that is no array, behind rule", last);
        }
        if (strcmp(a.rule, last)) { /* the arrays of a rule follow one another */
            if (!(data = slurp(v, folder, a.rule, &size))) {
                fclose(index);
                return fail(v, "cannot read the data of", a.rule);
            }
            strcpy(last, a.rule);
        }
        a.rows = rows, a.columns = columns, a.width = width_of(a.type), a.bytes = data + offset;
        arrays = (nvfp4_array *)realloc(v->arrays, (v->count + 1) * sizeof *arrays);
        if (!arrays || offset > size || rows > size / columns || rows * columns > (size - offset) / a.width) {
            if (arrays)
                v->arrays = arrays;
            fclose(index);
            return fail(v, arrays ? "data end before the array of" : "no memory for", a.rule);
        }
        v->arrays = arrays;
        v->arrays[v->count++] = a;
    }
    fclose(index);
    return v->count ? 0 : fail(v, "no arrays in", path);
}

void nvfp4_close(nvfp4_vectors *v)
{
    while (v->file_count)
        free(v->files[--v->file_count]);
    free(v->files);
    free(v->arrays);
    memset(v, 0, sizeof *v);
}

const nvfp4_array *nvfp4_find(const nvfp4_vectors *v, const char *rule, int set, const char *name)
{
    size_t i;
    for (i = 0; i < v->count; i++)
        if (v->arrays[i].set == set && !strcmp(v->arrays[i].rule, rule) && !strcmp(v->arrays[i].name, name))
            return &v->arrays[i];
    return NULL;
}

uint64_t nvfp4_value(const nvfp4_array *array, size_t row, size_t column)
{
    const unsigned char *p = array->bytes + (row * array->columns + column) * array->width;
    uint64_t bits = 0;
    size_t i;
    for (i = array->width; i--;)
        bits = bits << 8 | p[i];
    return bits;
}
