/* Calls functions of the compiled kernel on aarch64, as a file of requests says, and writes what they return and leave.
 *
 * driver REQUESTS RESULTS. All numbers of both files are 64 bits. A request is:
 *   function (an index of `functions`), buffers, arguments;
 *   for each buffer its size, its bytes, and its pointers: how many, and of each its offset and the buffer it points to, or -1;
 *   for each argument its kind and its value: a number, the index of a buffer, the bits of a float, or nothing for the pool.
 * A result is what the function returns, and then every buffer's bytes, pointers as 0. Every buffer is a block of its own. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBER, BUFFER, FLOAT, POOL };
enum { MOST_BUFFERS = 512, MOST_ARGUMENTS = 15, THREADS = 2 };

typedef struct { uint8_t *bytes; int64_t size, pointers, *at; } buffer;

#define FUNCTIONS(of) \
    of(paths) of(choose_path) of(chosen_path) of(choose_widest) of(bf16) of(vnni_encoding) of(expert_product) of(experts) \
    of(quantize_rows) of(weighted_sum) of(rms_norm) of(add_rows) of(norm_rows) of(attention) of(attention_rows) of(decode_layers) of(embed) \
    of(head) of(levels) of(renormalise) of(router_topk) of(router_states) of(remap) of(dense_product) of(dense_heads) of(wide_product) of(precise_product) \
    of(delta_net) of(short_conv) of(state_space) of(latent_rows) of(code_columns)
#define DECLARED(name) void edgemoe_##name(void);
#define ADDRESS(name) {#name, edgemoe_##name},
FUNCTIONS(DECLARED)
static const struct { const char *name; void (*call)(void); } functions[] = {FUNCTIONS(ADDRESS)};

void *edgemoe_open(int threads);

/* Linux on aarch64 passes the first eight numbers and pointers in registers, others in 8 bytes of stack each, and a float in
 * a register of its own, wherever it stands: one type calls every function. */
typedef int64_t (*any)(float, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       int64_t, int64_t, int64_t, int64_t);

static void expect(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "expected %s, got none: write requests as this file says\n", what);
    exit(2);
}

static int64_t number(FILE *from) {
    int64_t read;
    expect(fread(&read, sizeof read, 1, from) == 1, "a number");
    return read;
}

static void read_buffer(FILE *from, buffer *b) {
    b->size = number(from);
    b->bytes = aligned_alloc(64, (size_t)(b->size / 64 + 1) * 64);
    expect(b->bytes && fread(b->bytes, 1, (size_t)b->size, from) == (size_t)b->size, "the bytes of a buffer");
    b->pointers = number(from);
    b->at = calloc((size_t)b->pointers * 2 + 1, sizeof *b->at);
    for (int64_t i = 0; i < 2 * b->pointers; i++) b->at[i] = number(from);
}

/* Sets a buffer's pointers, to 0 if `buffers` is NULL. */
static void set_pointers(const buffer *b, const buffer *buffers) {
    for (int64_t i = 0; i < b->pointers; i++) {
        const int64_t to = b->at[2 * i + 1];
        uint8_t *pointer = buffers && to >= 0 ? buffers[to].bytes : NULL;
        memcpy(b->bytes + b->at[2 * i], &pointer, sizeof pointer);
    }
}

static int64_t call(FILE *from, int64_t function, const buffer *buffers, int64_t count, void *pool) {
    int64_t a[MOST_ARGUMENTS] = {0};
    float x = 0;
    for (int64_t i = 0, n = 0; i < count; i++) {
        const int64_t kind = number(from), value = number(from);
        const int32_t bits = (int32_t)value;
        if (kind == FLOAT) memcpy(&x, &bits, sizeof x);
        else a[n++] = kind == BUFFER ? (int64_t)buffers[value].bytes : kind == POOL ? (int64_t)pool : value;
    }
    return ((any)functions[function].call)(x, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14]);
}

int main(int argc, char **argv) {
    if (argc == 1) {
        for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) puts(functions[i].name);
        return 0;
    }
    FILE *from = fopen(argv[1], "rb"), *to = fopen(argv[2], "wb");
    void *pool = edgemoe_open(THREADS);
    expect(from && to && pool, "two files and threads");
    for (int64_t function; fread(&function, sizeof function, 1, from) == 1;) {
        buffer buffers[MOST_BUFFERS];
        const int64_t count = number(from), arguments = number(from);
        expect(count <= MOST_BUFFERS && arguments <= MOST_ARGUMENTS + 1, "few enough buffers and arguments");
        for (int64_t i = 0; i < count; i++) read_buffer(from, buffers + i);
        for (int64_t i = 0; i < count; i++) set_pointers(buffers + i, buffers);
        const int64_t result = (int32_t)call(from, function, buffers, arguments, pool);
        fwrite(&result, sizeof result, 1, to);
        for (int64_t i = 0; i < count; i++) {
            set_pointers(buffers + i, NULL);
            fwrite(buffers[i].bytes, 1, (size_t)buffers[i].size, to);
            free(buffers[i].bytes);
            free(buffers[i].at);
        }
    }
    return fclose(to) != 0;
}
