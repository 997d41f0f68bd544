/* Joins the codes of a chunk, which lie in several planes, to a tile that is multiplied with many tokens. */
#pragma once
#include "planes.h"

#if COMPILED
/* Joins a chunk of CHUNK columns' codes to `tile` [CHUNK / 4, BLOCK_ROWS, 4], of every 4 columns in the order 0 2 1 3; of a
 * block of 16 rows the first 16. */
void join_fours(const matrix *m, const expert *e, int64_t block, int64_t c, uint8_t *tile);

/* The same for `chunk` columns; unless `by_fours`, codes at level 8 are joined in pairs of columns: 0 and 2, 1 and 3, ... */
void join_rows(const matrix *m, const expert *e, int64_t block, int64_t c, int64_t chunk, int by_fours, uint8_t *tile);
#endif
