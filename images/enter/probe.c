/*
 * enter probe COUNT MNT NET SCRIPT STATUS [GROUP ...] TIMEOUT_MS LAYER ... - runs a hidden check beside a container.
 *
 * MNT, NET: namespaces of the container. SCRIPT: a file with what `sh -c` shall run. GROUP: cgroup.procs files of the
 * container. LAYER: the image's directories, topmost first. Output goes to stdout; STATUS gets one line, the only word
 * on how it ended: "exit N", "signal N", "timeout", or "error ..." for what is not the check's doing.
 *
 * Three processes: this one waits outside; the second is PID 1 of the probe's pid namespace (a sibling of the
 * container's, so nothing in the container sees it), makes the view and reaps; the third becomes the image's shell. The
 * second's death is the death of all of them, and it dies with the first. The container's limits and device rules are
 * joined after the view is made and before anything of the image runs: a container without memory or processes left
 * cannot turn its check into an error of ours, and the shell's own process exists already when the limit on
 * processes begins to count.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char *read_script(int file)
{
	struct stat about;
	char *text;
	ssize_t length;

	need(fstat(file, &about), "script");
	text = calloc(1, about.st_size + 1);
	if (!text)
		fail("script");
	for (off_t done = 0; done < about.st_size; done += length) {
		length = need(pread(file, text + done, about.st_size - done, done), "script");
		if (!length)
			break;
	}
	return text;
}

static void write_text(int file, const char *text, const char *what)
{
	need(write(file, text, strlen(text)), what);
}

NORETURN static void become_shell(int go, char *script)
{
	static char *const environment[] = {
		"PATH=/run/probe:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LANG=C.UTF-8", "TARGET=/target", NULL,
	};
	char *const arguments[] = { "sh", "-c", script, NULL };
	char order;

	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
	if (read(go, &order, 1) != 1)
		_exit(125);
	need(setsid(), "session");
	confine();
	umask(022);
	need(syscall(SYS_close_range, 3, ~0u, CLOSE_RANGE_CLOEXEC), "close_range");
	execve("/bin/sh", arguments, environment);
	fail("cannot run the image's /bin/sh");
}

/* PID 1 of the probe's pid namespace; tells how the shell ended. HOLD has an end once the process outside is gone. */
NORETURN static void be_init(int hold, const struct sources *from, char *script, const int *groups, int count)
{
	struct pollfd outside = { .fd = hold, .events = POLLIN };
	char process[16];
	int go[2], state;
	pid_t shell;

	need(prctl(PR_SET_PDEATHSIG, SIGKILL), "death signal");
	if (poll(&outside, 1, 0))
		_exit(125);
	need(setsid(), "session");
	enter_view(from);
	need(pipe2(go, O_CLOEXEC), "pipe");
	shell = need(fork(), "fork");
	if (!shell) {
		close(go[1]);
		become_shell(go[0], script);
	}
	close(go[0]);
	snprintf(process, sizeof process, "%d", (int)shell);
	for (int i = 0; i < count; i++) {
		write_text(groups[i], process, "join the container's cgroup");
		write_text(groups[i], "0", "join the container's cgroup");
	}
	confine();
	write_text(go[1], "g", "go");
	while (need(waitpid(-1, &state, 0), "wait") != shell)
		;
	if (WIFSIGNALED(state))
		dprintf(report_fd, "signal %d\n", WTERMSIG(state));
	else
		dprintf(report_fd, "exit %d\n", WEXITSTATUS(state));
	_exit(0);
}

int run_probe(const int *descriptors, int count, char **arguments, int argument_count)
{
	struct sources from = { .layers = arguments + 1, .layer_count = argument_count - 1 };
	int timeout_ms = number(arguments[0]), hold[2], state, handle;
	struct pollfd init = { .events = POLLIN };
	char *script;
	pid_t child;

	report_fd = descriptors[3];
	/* Where the container is short of memory, its own programs are not to die for the check. */
	handle = need(open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC), "oom_score_adj");
	write_text(handle, "1000", "oom_score_adj");
	close(handle);
	script = read_script(descriptors[2]);
	open_sources(&from, descriptors[0]);
	need(setns(descriptors[1], CLONE_NEWNET), "join network namespace");
	need(unshare(CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID), "own namespaces");
	need(sethostname("probe", 5), "hostname");
	need(pipe2(hold, O_CLOEXEC), "pipe");
	child = need(fork(), "fork");
	if (!child) {
		close(hold[1]);
		be_init(hold[0], &from, script, descriptors + 4, count - 4);
	}
	close(hold[0]);
	init.fd = need(syscall(SYS_pidfd_open, child, 0), "pidfd_open");
	if (!need(poll(&init, 1, timeout_ms), "poll")) {
		need(syscall(SYS_pidfd_send_signal, init.fd, SIGKILL, NULL, 0), "kill");
		need(waitpid(child, &state, 0), "wait");
		dprintf(report_fd, "timeout\n");
		return 0;
	}
	need(waitpid(child, &state, 0), "wait");
	if (WIFSIGNALED(state)) /* killed in the container's cgroup: out of memory */
		dprintf(report_fd, "signal %d\n", WTERMSIG(state));
	return 0;
}
