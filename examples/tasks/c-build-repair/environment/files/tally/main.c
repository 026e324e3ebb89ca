#include <stdio.h>

#include "count.h"

int main(int argc, char **argv)
{
    struct counts counts;
    FILE *in;

    if (argc != 2) {
        fprintf(stderr, "usage: tally FILE\n");
        return 2;
    }
    in = fopen(argv[1], "r");
    if (count(in, &counts) != 0) {
        perror(argv[1]);
        return 1;
    }
    printf("%d lines\n%d words\n%d bytes\n", counts.lines, counts.words, counts.bytes);
    return 0;
}
