#!/bin/bash
# Saves all text files of a folder, compressed.
source=$1
target=$2
mkdir -p $target
count=0
for file in $(find $source -name *.txt); do
    name=${file#$source/}
    mkdir -p $target/$(dirname $name)
    gzip -c $file > $target/$name.gz
    count=$((count + 1))
done
find $source -name *.txt | wc -l | read count
echo "$count files saved"
