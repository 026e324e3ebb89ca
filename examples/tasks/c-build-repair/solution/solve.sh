#!/bin/bash
set -euo pipefail
cd /app/tally
cat > Makefile <<'END'
CC = gcc
CFLAGS = -std=c11 -Wall -Wextra -Werror -O1

tally: main.o count.o
	$(CC) $(CFLAGS) -o $@ main.o count.o

%.o: %.c count.h
	$(CC) $(CFLAGS) -c -o $@ $<

clean:
	rm -f tally *.o
END
cat > count.h <<'END'
#ifndef COUNT_H
#define COUNT_H

#include <stdio.h>

struct counts {
    long lines;
    long words;
    long bytes;
};

/* Adds up a whole file; 0, or -1 when it can't be read. */
int count(FILE *in, struct counts *out);

#endif
END
cat > count.c <<'END'
#include <ctype.h>

#include "count.h"

int count(FILE *in, struct counts *out)
{
    int c, last = '\n', in_word = 0;

    *out = (struct counts){0, 0, 0};
    while ((c = fgetc(in)) != EOF) {
        out->bytes++;
        if (c == '\n')
            out->lines++;
        if (isspace(c)) {
            in_word = 0;
        } else if (!in_word) {
            in_word = 1;
            out->words++;
        }
        last = c;
    }
    if (last != '\n')
        out->lines++;
    return ferror(in) ? -1 : 0;
}
END
sed -i 's/if (count(in, &counts) != 0)/if (in == NULL || count(in, \&counts) != 0)/; s/%d/%ld/g' main.c
make
