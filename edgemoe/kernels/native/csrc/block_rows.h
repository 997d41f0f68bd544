/* A block of rows: 32 rows of a matrix whose codes lie together and are multiplied together, in the planes of experts and in
 * the strips of dense weights. */
#pragma once

enum { BLOCK_ROWS = 32 };
