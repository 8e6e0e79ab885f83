/* Shared by the parts of the enter helper. Every function ends the process through fail() unless it says otherwise. */
#ifndef ENTER_H
#define ENTER_H

#include <stddef.h>

#define NORETURN __attribute__((noreturn))

/* Where fail() writes: stderr, or the status pipe of a probe. */
extern int report_fd;

/* Writes "error WHAT: <errno in words>" and ends with 125. */
NORETURN void fail(const char *what);
/* RESULT unless it is negative: then fail(). */
long need(long result, const char *what);
/* A descriptor's number in an argument; anything else is an error of the caller. */
int number(const char *text);

/* The verbs; they answer the exit status. */
int show_mounts(const int *descriptors, char **paths, int count);
int run_probe(const int *descriptors, int count, char **arguments, int argument_count);
int target_path(const char *path);

/* view.c: what the view is made of, opened in the host's and the container's mount namespaces. */
enum { DEVICES = 5 };
struct sources {
	int target;	      /* detached read-only clone of the container's live tree */
	int devices[DEVICES]; /* detached clones of the host's device nodes */
	int program;	      /* this program, put into the view as target-path */
	char **layers;	      /* the image's directories, topmost first */
	int layer_count;
};
/* The caller is in a private mount namespace afterwards. */
void open_sources(struct sources *from, int container_mounts);
/* The caller's root is the view afterwards, and nothing else is mounted. It stands in its own pid namespace. */
void enter_view(const struct sources *from);

/* confine.c: the caller has given up for good what a program of the image must not have. */
void confine(void);

#endif
