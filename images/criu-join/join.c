/*
 * Preload object for CRIU: everything of ours is loaded from the host first, and only then are the container's namespaces
 * joined, so that no file of the container is ever loaded or executed by it.
 *
 *   ld.so --inhibit-cache --library-path LIB --preload join.so criu ... swrk FD
 *   JOIN = "pid net uts cgroup mnt work last count group... enter_pid leave_pid"
 *
 * Words are descriptors, -1 for none: namespaces of the container; WORK, the host's directory that becomes the current
 * one; LAST, ns_last_pid of the host's procfs; COUNT files by which cgroups are joined. CRIU itself gets a pid above ENTER_PID, out of
 * the way of what it restores; the next process after it one above LEAVE_PID. 0 leaves the numbers alone.
 *
 * The ipc namespace is not joined: CRIU carries System V objects only when the tree's differs from its own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/keyctl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { GROUPS = 32, FAILED = 97 };
enum { PID, NET, UTS, CGROUP, MNT, WORK, LAST, COUNT };

static void need(int failed, const char *what)
{
	if (!failed)
		return;
	perror(what);
	_exit(FAILED);
}

/* The kernel takes the number for the pid namespace of the writer, so that has to be one of its members. */
static void next_pid(int file, long pid)
{
	char text[32];
	pid_t child = fork();

	need(child < 0, "fork");
	if (!child)
		_exit(pwrite(file, text, sprintf(text, "%ld", pid), 0) < 0);
	while (waitpid(child, NULL, 0) < 0)
		;
}

static void enter(int descriptor, int kind, const char *what)
{
	if (descriptor < 0)
		return;
	need(setns(descriptor, kind), what);
	close(descriptor);
}

__attribute__((constructor)) static void join(void)
{
	static const struct rlimit none;
	char *text = getenv("JOIN");
	int words[COUNT + 1], groups[GROUPS], state;
	long enter_pid, leave_pid;
	pid_t child;

	if (!text)
		return;
	for (int i = 0; i <= COUNT; i++)
		words[i] = strtol(text, &text, 10);
	need(words[COUNT] > GROUPS, "groups");
	for (int i = 0; i < words[COUNT]; i++)
		groups[i] = strtol(text, &text, 10);
	enter_pid = strtol(text, &text, 10);
	leave_pid = strtol(text, &text, 10);
	unsetenv("JOIN");

	need(prctl(PR_SET_DUMPABLE, 0), "dumpable");
	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
	syscall(SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, 0);
	umask(077);
	need(setrlimit(RLIMIT_CORE, &none), "core limit");
	enter(words[PID], CLONE_NEWPID, "pid namespace");
	if (enter_pid)
		next_pid(words[LAST], enter_pid);
	child = fork();
	need(child < 0, "fork");
	if (child) {
		while (waitpid(child, &state, 0) < 0)
			;
		if (leave_pid)
			next_pid(words[LAST], leave_pid);
		_exit(WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state));
	}
	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
	setsid(); /* a tree restored with shell_job takes the caller's session */
	for (int i = 0; i < words[COUNT]; i++) {
		need(write(groups[i], "0", 1) != 1, "container's cgroup");
		close(groups[i]);
	}
	enter(words[UTS], CLONE_NEWUTS, "uts namespace");
	enter(words[NET], CLONE_NEWNET, "net namespace");
	enter(words[CGROUP], CLONE_NEWCGROUP, "cgroup namespace");
	enter(words[MNT], CLONE_NEWNS, "mount namespace");
	need(fchdir(words[WORK]), "work directory");
	if (words[LAST] >= 0)
		close(words[LAST]);
}
