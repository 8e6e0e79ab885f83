/*
 * enter - the one program that enters the namespaces of a container, started by the orchestrator, run on the host.
 *
 *   enter mounts 3 MNT SOCKET PROC [PATH ...]                              see mounts.c
 *   enter probe COUNT MNT NET SCRIPT STATUS [GROUP ...] TIMEOUT_MS LAYER ... see probe.c
 *   target-path PATH                                                       in a probe's view, see target_path.c
 *
 * Words up to the count are numbers of inherited descriptors. It is started from a sealed memory file with an empty
 * environment, so that nothing the container could reach through /proc leads to a file or a secret of the host; it is
 * static and loads nothing. First it takes from itself what could be looked at, inherited or left behind.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <limits.h>
#include <linux/keyctl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DESCRIPTORS = 64 };

int report_fd = 2;

NORETURN void fail(const char *what)
{
	dprintf(report_fd, "error %s: %s\n", what, strerror(errno));
	_exit(125);
}

long need(long result, const char *what)
{
	if (result < 0)
		fail(what);
	return result;
}

int number(const char *text)
{
	char *end;
	long value = strtol(text, &end, 10);

	if (end == text || *end || value < 0 || value > INT_MAX) {
		errno = EINVAL;
		fail("argument");
	}
	return (int)value;
}

static int by_value(const void *left, const void *right)
{
	return *(const int *)left - *(const int *)right;
}

/* Closes all but stdio and the descriptors that the arguments name. */
static void close_others(int *kept, int count)
{
	int from = 3;

	qsort(kept, count, sizeof *kept, by_value);
	for (int i = 0; i < count; i++) {
		if (kept[i] > from)
			need(syscall(SYS_close_range, from, kept[i] - 1, 0), "close_range");
		if (kept[i] >= from)
			from = kept[i] + 1;
	}
	need(syscall(SYS_close_range, from, ~0u, 0), "close_range");
}

static void harden(const int *descriptors, int count)
{
	static const struct rlimit none = { 0, 0 };
	sigset_t nothing;
	int kept[DESCRIPTORS];

	need(prctl(PR_SET_DUMPABLE, 0), "dumpable");
	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
	if (syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0) < 0 && errno != ENOSYS)
		fail("session keyring");
	umask(077);
	memcpy(kept, descriptors, count * sizeof *kept);
	close_others(kept, count);
	need(setrlimit(RLIMIT_CORE, &none), "core limit");
	sigemptyset(&nothing);
	need(sigprocmask(SIG_SETMASK, &nothing, NULL), "signal mask");
	clearenv();
}

int main(int argc, char **argv)
{
	const char *slash = argc ? strrchr(argv[0], '/') : NULL;
	int descriptors[DESCRIPTORS];
	int count, rest;

	if (argc == 2 && !strcmp(slash ? slash + 1 : argv[0], "target-path"))
		return target_path(argv[1]);
	count = argc > 2 ? number(argv[2]) : 0;
	rest = argc - 3 - count;
	if (count < 3 || count > DESCRIPTORS || rest < 0) {
		dprintf(2, "enter is started by the orchestrator only\n");
		return 2;
	}
	for (int i = 0; i < count; i++)
		descriptors[i] = number(argv[3 + i]);
	harden(descriptors, count);
	if (!strcmp(argv[1], "mounts") && count == 3)
		return show_mounts(descriptors, argv + 3 + count, rest);
	if (!strcmp(argv[1], "probe") && count >= 4 && rest >= 2)
		return run_probe(descriptors, count, argv + 3 + count, rest);
	errno = EINVAL;
	fail("verb");
}
