/* seen.c: what was reported since the last answer. Its memory is bounded; what does not fit makes the answer "lost". */
#ifndef SEEN_H
#define SEEN_H

#include <stddef.h>
#include <stdint.h>

/* The inode itself changed. */
void saw_inode(uint64_t inode);
/* NAME in the directory came, went or became something else. */
void saw_name(uint64_t directory, const char *name, size_t length);
/* Events were dropped, or cannot be understood. */
void saw_loss(void);
/*
 * Writes all of it to a descriptor and forgets it: three 32-bit numbers (1 if something was lost, count of inodes N,
 * count of names M), N inodes, M directories (64 bits each), M ends of names (32 bits each), the names back to back.
 * Answers -1 if it cannot be written.
 */
int answer(int descriptor);

#endif
