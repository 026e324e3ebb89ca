#include <ctype.h>

#include "count.h"

int count(FILE *in, struct counts *out)
{
    int c, previous = ' ';

    while ((c = fgetc(in)) != EOF) {
        out->bytes++;
        if (c == '\n')
            out->lines++;
        if (c == ' ' && previous != ' ')
            out->words++;
        previous = c;
    }
    return ferror(in) ? -1 : 0;
}
