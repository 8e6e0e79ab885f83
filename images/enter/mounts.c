/*
 * enter mounts 3 MNT SOCKET PROC [PATH ...] - the mounts of a container, seen from inside its mount namespace MNT.
 *
 * For each PATH one packet {u32 index, u32 errno} goes to SOCKET, with a descriptor of a detached clone of the mount at
 * PATH where errno is 0. PATH must be the root of a mount and no component a symbolic link (the container owns them):
 * ELOOP, ENOENT, ENOTDIR, or EINVAL for no mount. Then the mount table, read through PROC, the host's procfs, goes to
 * stdout: joining the namespace set our root to its root, whatever PID 1 of the container did to its own.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/stat.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A clone of the mount at PATH, or a negative errno. */
static int clone_mount(int root, const char *path)
{
	struct open_how how = { .flags = O_PATH | O_NOFOLLOW | O_CLOEXEC,
				.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS };
	int found = syscall(SYS_openat2, root, path, &how, sizeof how);
	struct statx about;
	int clone;

	if (found < 0)
		return -errno;
	if (syscall(SYS_statx, found, "", AT_EMPTY_PATH | AT_NO_AUTOMOUNT, STATX_TYPE, &about))
		clone = -errno;
	else if (!(about.stx_attributes & STATX_ATTR_MOUNT_ROOT))
		clone = -EINVAL;
	else {
		clone = syscall(SYS_open_tree, found, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);
		if (clone < 0)
			clone = -errno;
	}
	close(found);
	return clone;
}

static void send_answer(int socket, uint32_t index, int clone)
{
	uint32_t answer[2] = { index, clone < 0 ? -clone : 0 };
	union {
		struct cmsghdr header;
		char space[CMSG_SPACE(sizeof(int))];
	} control = { 0 };
	struct iovec body = { answer, sizeof answer };
	struct msghdr message = { .msg_iov = &body, .msg_iovlen = 1 };

	if (clone >= 0) {
		message.msg_control = &control;
		message.msg_controllen = sizeof control;
		control.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
						   .cmsg_level = SOL_SOCKET,
						   .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&control.header), &clone, sizeof clone);
	}
	need(sendmsg(socket, &message, MSG_NOSIGNAL), "answer");
}

static void copy_table(int proc)
{
	char buffer[1 << 16];
	int table = need(openat(proc, "self/mountinfo", O_RDONLY | O_CLOEXEC), "mountinfo");
	ssize_t length;

	while ((length = need(read(table, buffer, sizeof buffer), "mountinfo")) > 0)
		for (ssize_t done = 0; done < length;)
			done += need(write(1, buffer + done, length - done), "write");
}

int show_mounts(const int *descriptors, char **paths, int count)
{
	int root;

	need(setns(descriptors[0], CLONE_NEWNS), "join mount namespace");
	root = need(open("/", O_PATH | O_DIRECTORY | O_CLOEXEC), "root");
	for (int i = 0; i < count; i++) {
		int clone = clone_mount(root, paths[i]);

		send_answer(descriptors[1], i, clone);
		if (clone >= 0)
			close(clone);
	}
	copy_table(descriptors[2]);
	return 0;
}
