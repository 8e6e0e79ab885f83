/*
 * tracker - says which inodes of one file system changed, on the host, started by the orchestrator.
 *
 *   tracker DIRECTORY        number of an inherited descriptor of any directory on the file system
 *
 * One fanotify mark on the whole file system, so the changes of everybody on the host come by; they are kept as a set,
 * in bounded memory. Standard output gets one byte once the mark is set. Then each byte on standard input is a question
 * for what changed since the last one, answered on standard output (see seen.h); its end ends the program. An answer
 * holds every change that was made before its question was asked: the kernel queues an event within the call that
 * causes it.
 *
 * Source: fanotify(7), fanotify_init(2), fanotify_mark(2), name_to_handle_at(2).
 */
#define _GNU_SOURCE
#include "seen.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fanotify.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NAMES_CHANGED (FAN_CREATE | FAN_DELETE | FAN_MOVED_FROM | FAN_MOVED_TO)
/* The close of a file that was open for writing stands for what was written through a mapping of it. */
#define INODE_CHANGED (FAN_MODIFY | FAN_ATTRIB | FAN_CLOSE_WRITE)

enum { BUFFER = 1 << 16, QUEUE = 16384 };

struct handle {
	uint32_t size;
	int32_t type;
	unsigned char bytes[];
};

static void fail(const char *what)
{
	dprintf(2, "error %s: %s\n", what, strerror(errno));
	_exit(125);
}

/* The inode's number in a handle; 0 if this kind of handle is not known. Source: include/linux/exportfs.h, xfs_export.h. */
static uint64_t inode_of(const struct handle *handle)
{
	uint32_t low;
	uint64_t whole;

	if (handle->type == 1 && handle->size == 8) { /* number and generation, 32 bits each: ext4, small ones of xfs */
		memcpy(&low, handle->bytes, sizeof low);
		return low;
	}
	if (handle->type == 0x81 && handle->size >= 12) { /* xfs: number, 64 bits, and generation */
		memcpy(&whole, handle->bytes, sizeof whole);
		return whole;
	}
	return 0;
}

static void take_event(const struct fanotify_event_metadata *event)
{
	const char *at = (const char *)event + event->metadata_len, *end = (const char *)event + event->event_len;
	uint64_t inode = 0, directory = 0;
	const char *name = NULL;

	if (event->mask & FAN_Q_OVERFLOW) {
		saw_loss();
		return;
	}
	while (at < end) {
		const struct fanotify_event_info_fid *info = (const void *)at;
		const struct handle *handle = (const void *)info->handle;

		if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_FID) {
			inode = inode_of(handle);
		} else if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID_NAME) {
			directory = inode_of(handle);
			name = (const char *)handle->bytes + handle->size;
		} else if (info->hdr.info_type == FAN_EVENT_INFO_TYPE_DFID) {
			directory = inode_of(handle);
		}
		at += info->hdr.len;
	}
	if (event->mask & NAMES_CHANGED) {
		if (directory && name)
			saw_name(directory, name, strlen(name));
		else
			saw_loss();
	}
	if (event->mask & INODE_CHANGED) {
		/* A directory is named by itself, as the entry "." of it. */
		if (!inode && (!name || !strcmp(name, ".")))
			inode = directory;
		if (inode)
			saw_inode(inode);
		else
			saw_loss();
	}
}

/* Answers how many events there were; none: the queue is empty. */
static int take_events(int group)
{
	static char buffer[BUFFER] __attribute__((aligned(8)));
	ssize_t size = read(group, buffer, sizeof buffer);
	const struct fanotify_event_metadata *event = (const void *)buffer;
	int count = 0;

	if (size < 0 && errno != EAGAIN && errno != EINTR)
		fail("read");
	for (; FAN_EVENT_OK(event, size); event = FAN_EVENT_NEXT(event, size), count++)
		take_event(event);
	return count;
}

static int queue_size(void)
{
	FILE *file = fopen("/proc/sys/fs/fanotify/max_queued_events", "re");
	int size = QUEUE;

	if (file) {
		if (fscanf(file, "%d", &size) != 1 || size <= 0)
			size = QUEUE;
		fclose(file);
	}
	return size;
}

int main(int argc, char **argv)
{
	static const struct rlimit none = { 0, 0 };
	struct pollfd waits[2] = { { .events = POLLIN }, { .fd = 0, .events = POLLIN } };
	int group, most = queue_size();
	char question;

	if (argc != 2) {
		dprintf(2, "tracker is started by the orchestrator only\n");
		return 2;
	}
	prctl(PR_SET_DUMPABLE, 0);
	setrlimit(RLIMIT_CORE, &none);
	setpriority(PRIO_PROCESS, 0, -10); /* there is little to do, but on a busy host the kernel's queue is full soon */
	group = syscall(SYS_fanotify_init,
			FAN_CLASS_NOTIF | FAN_CLOEXEC | FAN_NONBLOCK | FAN_REPORT_FID | FAN_REPORT_DFID_NAME, O_RDONLY);
	if (group < 0)
		fail("fanotify_init");
	if (syscall(SYS_fanotify_mark, group, FAN_MARK_ADD | FAN_MARK_FILESYSTEM,
		    (uint64_t)(NAMES_CHANGED | INODE_CHANGED | FAN_ONDIR), atoi(argv[1]), NULL) < 0)
		fail("fanotify_mark");
	close(atoi(argv[1]));
	if (write(1, "!", 1) != 1)
		return 1;
	waits[0].fd = group;
	for (;;) {
		if (poll(waits, 2, -1) < 0 && errno != EINTR)
			fail("poll");
		if (waits[1].revents) {
			if (read(0, &question, 1) != 1)
				return 0;
			/* The queue is first in, first out: what stood in it is read after so many, whatever comes on top. */
			for (int count = 0, more = 1; more && count <= most; count += more)
				more = take_events(group);
			if (answer(1))
				return 1;
		} else if (waits[0].revents) {
			take_events(group);
		}
	}
}
