// What a prefill kernel is called with: one KV head and its group of query heads.

#pragma once

#include <cstdint>

// Strides are in elements; those of features are 1.
struct Shape {
    int64_t group, queries, keys, dim;
    int64_t query_head, query_row, key_row, value_row, out_head, out_row;
    float scale;
    int32_t causal;  // query i sees the keys up to keys - queries + i
    int64_t window;  // if causal: only the last `window` of these
    int64_t kind;
};
