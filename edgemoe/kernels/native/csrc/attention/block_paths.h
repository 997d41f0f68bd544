/* The choice of the functions that compute blocks of keys. */
#pragma once
#include "block.h"

#if COMPILED
/* The functions of a path. */
const block_path *block_path_of(enum path path);
#endif
