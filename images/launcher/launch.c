/*
 * launch - starts every command of the container below one subreaper, so that a command's process tree can be found,
 * ended and checkpointed, and so that what it leaves running neither holds the engine's call open nor dies of a pipe
 * that ended in the engine.
 *
 *   launch serve                      become the subreaper and listen; 0 once it listens (or one does already)
 *   launch run [-d] [-C dir] -- argv  have the server run argv, copy its answer to stdout; -d: do not wait for the end
 *   launch hold uid                   PID 1: become that user without any capability, reap, hold the container open
 *
 * request  u32 bytes of strings, u32 argc, u32 flags; then cwd, argv and environment, each ended by NUL
 * answer   frames of u8 type, u32 length (little endian), data:
 *          's' session id, 'o' output, 'x' exit status as shells give it, then '+' if something of it runs on, else '-'
 *
 * The server forks a keeper for each caller: whatever a caller sends, or does not read, hurts its own keeper alone.
 * A caller gets the rights that it has: SO_PEERCRED says who it is, never the request.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define NAME "\0orchestrator-launch"

enum { REQUEST_BYTES = 4 << 20, STRINGS = 1 << 17, GROUPS = 1 << 16, CHUNK = 32 << 10, REQUEST_S = 5, DETACH = 1 };
enum { FAILED = 1, NO_SERVER = 125, CANNOT_RUN = 126, NOT_FOUND = 127 };

struct request { uint32_t size, argc, flags; };

static int fail(const char *what, int status)
{
	dprintf(2, "launch: %s: %s\n", what, strerror(errno));
	return status;
}

static int named_socket(int (*attach)(int, const struct sockaddr *, socklen_t))
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };
	int sock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	memcpy(name.sun_path, NAME, sizeof(NAME) - 1);
	return attach(sock, (void *)&name, offsetof(struct sockaddr_un, sun_path) + sizeof(NAME) - 1) ? -1 : sock;
}

/* Anybody can take the name while no server runs; a request, which may hold secrets, is for root's server only. */
static int connect_server(void)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);
	int sock = named_socket(connect);

	if (sock < 0 || (!getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.uid == 0))
		return sock;
	errno = EPERM;
	return -1;
}

static int send_frame(int sock, char type, const void *data, uint32_t size)
{
	char frame[5 + CHUNK] = { type, size, size >> 8, size >> 16, size >> 24 };

	memcpy(frame + 5, data, size);
	/* A blocking socket takes all of it or fails. */
	return send(sock, frame, 5 + size, MSG_NOSIGNAL) == (ssize_t)(5 + size) ? 0 : -1;
}

static void run(int sock, int out, char **argv, char **env, const char *cwd)
{
	static gid_t groups[GROUPS];
	struct ucred peer;
	socklen_t size = sizeof(peer), groups_size = sizeof(groups);

	setsid();
	dup2(out, 1);
	dup2(out, 2);
	/* root stays what it is: a container without CAP_SETUID and CAP_SETGID is allowed */
	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size) ||
	    ((peer.uid || peer.gid) &&
	     (getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, groups, &groups_size) ||
	      setgroups(groups_size / sizeof(*groups), groups) ||
	      setresgid(peer.gid, peer.gid, peer.gid) || setresuid(peer.uid, peer.uid, peer.uid))))
		_exit(fail("taking the caller's user and groups", CANNOT_RUN));
	if (chdir(cwd))
		_exit(fail(cwd, CANNOT_RUN));
	environ = env;	/* execvp looks for PATH there */
	execvp(argv[0], argv);
	_exit(fail(argv[0], errno == ENOENT ? NOT_FOUND : CANNOT_RUN));
}

static int copy(int sock, int out, int most)
{
	char data[CHUNK];
	ssize_t n = read(out, data, most < CHUNK ? most : CHUNK);

	return n > 0 && send_frame(sock, 'o', data, n) ? -1 : n;
}

static int runs_on(int out, pid_t pid)
{
	struct pollfd fd = { out, 0, 0 };

	poll(&fd, 1, 0);
	return !(fd.revents & POLLHUP) || !kill(-pid, 0) || errno == EPERM;
}

/* Copies until the command ends, and then only what the pipe holds: what runs on may write for ever. */
static void follow(int sock, int out, pid_t pid, int pidfd)
{
	struct pollfd fds[] = { { out, POLLIN, 0 }, { sock, 0, 0 }, { pidfd, POLLIN, 0 } };
	int status, left, n;
	char text[16];

	while (!fds[2].revents && poll(fds, 3, -1) >= 0) {
		if (fds[1].revents || (fds[0].revents && (n = copy(sock, out, CHUNK)) < 0))
			return;
		if (fds[0].revents && n == 0)
			fds[0].fd = -1;
	}
	waitpid(pid, &status, 0);
	/*
	 * The kernel takes dead members out of the group a moment after their parent's end is seen, and the last member
	 * of a pipeline may outlive the shell as long: look a few times before it is said that something runs on.
	 */
	for (int look = 0; look < 5; look++) {
		for (ioctl(out, FIONREAD, &left); left > 0; left -= n)
			if ((n = copy(sock, out, left)) <= 0)
				return;
		if (!(left = runs_on(out, pid)))
			break;
		usleep(1000);
	}
	status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	send_frame(sock, 'x', text, sprintf(text, "%d%c", status, left ? '+' : '-'));
}

/* What was killed counts against the container's limit until it is reaped, a moment later. */
static pid_t fork_patiently(void)
{
	pid_t pid;

	for (int tries = 0; (pid = fork()) < 0 && errno == EAGAIN && tries < 200; tries++)
		usleep(10000);
	return pid;
}

/* One caller's request from beginning to end, in a process of its own. */
static void keep(int sock)
{
	static char *strings[STRINGS + 2], text[REQUEST_BYTES + 1];
	struct request request;
	uint32_t count = 0;
	int out[2], pidfd;
	pid_t pid;

	signal(SIGCHLD, SIG_DFL);
	alarm(REQUEST_S);
	if (recv(sock, &request, sizeof(request), MSG_WAITALL) != sizeof(request) || request.size > REQUEST_BYTES ||
	    recv(sock, text, request.size, MSG_WAITALL) != request.size)
		return;
	alarm(0);
	/* The NULL that ends argv shifts the environment by one. */
	for (char *s = text; s < text + request.size && count < STRINGS; s += strlen(s) + 1, count++)
		strings[count + (count > request.argc)] = s;
	if (request.argc < 1 || request.argc >= count)
		return;
	if (pipe2(out, O_CLOEXEC) || (pid = fork_patiently()) < 0) {
		send_frame(sock, 'o', text, sprintf(text, "launch: fork: %s\n", strerror(errno)));
		send_frame(sock, 'x', "126-", 4);
		return;
	}
	if (pid == 0)
		run(sock, out[1], strings + 1, strings + request.argc + 2, strings[0]);
	close(out[1]);
	send_frame(sock, 's', text, sprintf(text, "%d", pid));
	pidfd = syscall(SYS_pidfd_open, pid, 0);
	if (request.flags & DETACH)
		send_frame(sock, 'x', "0+", 2);
	else
		follow(sock, out[0], pid, pidfd);
	close(sock);
	close(pidfd);	/* what stays open is found in every checkpoint */
	signal(SIGCHLD, SIG_IGN);	/* a command that ends later is reaped by the kernel ... */
	waitpid(pid, NULL, WNOHANG);	/* ... and one that ended meanwhile here */
	while (read(out[0], text, CHUNK) > 0)
		;
}

static int serve(void)
{
	int listener, null, sock, ready[2];

	if (connect_server() >= 0)
		return 0;
	if (pipe2(ready, O_CLOEXEC))
		return fail("serve", FAILED);
	if (fork()) {
		close(ready[1]);
		return read(ready[0], &null, 1) == 1 ? 0 : FAILED;
	}
	setsid();
	if (fork())
		_exit(0);	/* leaves the server to PID 1 */
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	listener = named_socket(bind);
	if (null < 0 || listener < 0 || listen(listener, 128) || prctl(PR_SET_CHILD_SUBREAPER, 1) || chdir("/"))
		_exit(fail("serve", FAILED));
	for (int fd = 0; fd < 3; fd++)
		dup2(null, fd);
	signal(SIGCHLD, SIG_IGN);	/* orphans are reaped by the kernel, before their parent's end is seen */
	write(ready[1], "", 1);
	close(ready[1]);
	for (;; close(sock)) {
		if ((sock = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) < 0)
			usleep(10000);
		else if (fork_patiently() == 0)
			_exit((keep(sock), 0));
	}
}

static int ask(int argc, char **argv)
{
	static char text[REQUEST_BYTES];
	struct request request = { 0 };
	char *cwd = "/", *end = text, *limit = text + sizeof(text);
	int option, sock;
	ssize_t n;

	while ((option = getopt(argc, argv, "+dC:")) != -1)
		if (option == 'd')
			request.flags |= DETACH;
		else if (option == 'C')
			cwd = optarg;
		else
			return FAILED;
	request.argc = argc - optind;
	argv[--optind] = cwd;
	for (char **s = argv + optind; end && *s; s++)
		end = memccpy(end, *s, 0, limit - end);
	for (char **s = environ; end && *s; s++)
		end = memccpy(end, *s, 0, limit - end);
	if (!end)
		return errno = E2BIG, fail("run", CANNOT_RUN);
	request.size = end - text;
	if ((sock = connect_server()) < 0)
		return fail("no server", NO_SERVER);
	if (send(sock, &request, sizeof(request), MSG_NOSIGNAL) < 0 || send(sock, text, end - text, MSG_NOSIGNAL) < 0)
		return fail("the server hung up", FAILED);
	while ((n = recv(sock, text, CHUNK, 0)) > 0)
		if (write(1, text, n) != n)
			return FAILED;
	return 0;
}

/*
 * The kernel drops what the container sends to its PID 1 unless that has a handler, so here is none: `kill 1` by the
 * container's root ends nothing. (catatonit, tini and their like handle SIGTERM, and end.) Not dumpable, so that a
 * process of the same user cannot trace it either.
 */
static int hold(uid_t uid)
{
	if (getuid() != uid && (setgroups(0, NULL) || setresgid(uid, uid, uid) || setresuid(uid, uid, uid)))
		return fail("taking a user", CANNOT_RUN);
	if (prctl(PR_SET_DUMPABLE, 0))
		return fail("hiding", CANNOT_RUN);
	signal(SIGCHLD, SIG_IGN);	/* orphans are reaped by the kernel */
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	if (argc == 2 && !strcmp(argv[1], "serve"))
		return serve();
	if (argc > 2 && !strcmp(argv[1], "run"))
		return ask(argc - 1, argv + 1);
	if (argc == 3 && !strcmp(argv[1], "hold") && atoi(argv[2]) > 0)
		return hold(atoi(argv[2]));
	dprintf(2, "usage: launch serve | run [-d] [-C dir] -- argv | hold uid\n");
	return FAILED;
}
