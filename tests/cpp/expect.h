// A failed expectation prints where and what, and ends the program with 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define EXPECT(condition)                                                          \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)
