/*
 * The view of a probe: a root file system of the image's pristine layers, with the container's live tree at /target.
 *
 * Nothing that the container wrote is at any other path, nothing of the host's is left, and every target of a mount is
 * looked up with the view as the root, so that a link in the image leads nowhere else. It is all in memory and private
 * to the mount namespace: it goes away with the last process in it.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CLOSED (MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC)
#define PRIVATE (1ull << 18) /* MS_PRIVATE, as mount_setattr's propagation */

static const char *const device_names[DEVICES] = { "null", "zero", "full", "random", "urandom" };

enum { DETACH = 2 }; /* MNT_DETACH: no header of the kernel's own has it */
enum { OPTIONS_BYTES = 4096 }; /* a page: what mount(2) passes on */

static int clone_tree(int directory, const char *path, unsigned recursive)
{
	return need(syscall(SYS_open_tree, directory, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | recursive), path);
}

void open_sources(struct sources *from, int container_mounts)
{
	/* A link in the live tree is the agent's word on which file is looked at: none is followed (target_path.c). */
	struct mount_attr closed = { .attr_set = CLOSED | MOUNT_ATTR_NOSYMFOLLOW, .propagation = PRIVATE };
	char path[32];
	int ours;

	from->program = need(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), "own program");
	need(unshare(CLONE_NEWNS), "mount namespace");
	need(syscall(SYS_mount, "none", "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
	ours = need(open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), "own mount namespace");
	for (int i = 0; i < DEVICES; i++) {
		snprintf(path, sizeof path, "/dev/%s", device_names[i]);
		from->devices[i] = clone_tree(AT_FDCWD, path, 0);
	}
	need(setns(container_mounts, CLONE_NEWNS), "join mount namespace");
	from->target = clone_tree(AT_FDCWD, "/", AT_RECURSIVE);
	need(syscall(SYS_mount_setattr, from->target, "", AT_EMPTY_PATH | AT_RECURSIVE, &closed, sizeof closed),
	     "read-only clone (kernel 5.14 or newer)");
	need(setns(ours, CLONE_NEWNS), "leave mount namespace");
	close(ours);
}

/* A descriptor of PATH with ROOT as the root directory, links followed inside it. */
static int look_up(int root, const char *path, unsigned flags, unsigned mode)
{
	struct open_how how = { .flags = flags | O_CLOEXEC,
				.mode = mode,
				.resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS };

	return syscall(SYS_openat2, root, path, &how, sizeof how);
}

static int new_mount(const char *type, unsigned attributes, const char *size, const char *mode)
{
	int context = need(syscall(SYS_fsopen, type, FSOPEN_CLOEXEC), type), mount;

	if (size)
		need(syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "size", size, 0), type);
	if (size)
		need(syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "nr_inodes", "10k", 0), type);
	if (mode)
		need(syscall(SYS_fsconfig, context, FSCONFIG_SET_STRING, "mode", mode, 0), type);
	need(syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), type);
	mount = need(syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes), type);
	close(context);
	return mount;
}

static void attach(int mount, int place, const char *what)
{
	need(place, what);
	need(syscall(SYS_move_mount, mount, "", place, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH), what);
	close(mount);
	close(place);
}

static void attach_directory(int mount, int root, const char *path)
{
	if (mkdirat(root, path, 0755) && errno != EEXIST)
		fail(path);
	attach(mount, look_up(root, path, O_PATH | O_DIRECTORY, 0), path);
}

/* The image's layers below a small writable one, at /proc/root of our private mount namespace; answers its descriptor.
 * The list has to fit into a page, so each layer gets a short name, relative to the working directory. */
static int mount_image(const struct sources *from)
{
	char options[OPTIONS_BYTES] = "lowerdir=";
	size_t length = strlen(options);

	need(syscall(SYS_mount, "view", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,nr_inodes=10k,mode=755"), "tmpfs");
	need(chdir("/proc"), "tmpfs");
	need(mkdir("upper", 0755), "upper");
	need(mkdir("work", 0700), "work");
	need(mkdir("root", 0700), "root");
	for (int i = 0; i < from->layer_count; i++) {
		char name[16];

		snprintf(name, sizeof name, "%d", i);
		need(symlink(from->layers[i], name), "layer");
		length += snprintf(options + length, sizeof options - length, "%s%s", i ? ":" : "", name);
		if (length >= sizeof options - 64) {
			errno = E2BIG;
			fail("layers");
		}
	}
	strcpy(options + length, ",upperdir=upper,workdir=work");
	need(syscall(SYS_mount, "overlay", "root", "overlay", MS_NOSUID | MS_NODEV, options), "overlay of the image");
	return need(open("root", O_PATH | O_DIRECTORY | O_CLOEXEC), "root");
}

static void fill_dev(const struct sources *from, int root)
{
	static const char *const links[][2] = { { "/proc/self/fd", "fd" },
						{ "/proc/self/fd/0", "stdin" },
						{ "/proc/self/fd/1", "stdout" },
						{ "/proc/self/fd/2", "stderr" } };
	int dev;

	attach_directory(new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, "64k", "755"), root, "dev");
	dev = need(look_up(root, "dev", O_PATH | O_DIRECTORY, 0), "dev");
	for (int i = 0; i < DEVICES; i++) {
		close(need(look_up(dev, device_names[i], O_CREAT | O_EXCL | O_WRONLY, 0600), "device"));
		attach(dup(from->devices[i]), look_up(dev, device_names[i], O_PATH, 0), "device");
	}
	for (size_t i = 0; i < sizeof links / sizeof *links; i++)
		need(symlinkat(links[i][0], dev, links[i][1]), "device link");
	attach_directory(new_mount("tmpfs", CLOSED & ~MOUNT_ATTR_RDONLY, "16m", "1777"), dev, "shm");
	close(dev);
}

/* Read-only as a whole (root needs no capability to write /proc/sys), and masked as the engine does. */
static void fill_proc(const struct sources *from, int root)
{
	static const char *const masked[] = { "acpi", "asound", "kcore", "keys", "latency_stats", "timer_list",
					      "timer_stats", "sched_debug", "scsi", "interrupts" };
	struct stat about;
	int proc;

	attach_directory(new_mount("proc", CLOSED, NULL, NULL), root, "proc");
	proc = need(look_up(root, "proc", O_PATH | O_DIRECTORY, 0), "proc");
	for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
		if (fstatat(proc, masked[i], &about, AT_SYMLINK_NOFOLLOW))
			continue;
		attach(S_ISDIR(about.st_mode) ? new_mount("tmpfs", CLOSED, "4k", "755")
					      : clone_tree(from->devices[0], "", AT_EMPTY_PATH),
		       look_up(proc, masked[i], O_PATH, 0), masked[i]);
	}
	close(proc);
}

static void put_file(int root, const char *path, unsigned mode, int source, const char *text)
{
	int file = look_up(root, path, O_CREAT | O_TRUNC | O_WRONLY, mode);
	struct stat about;

	if (file < 0)
		fail(path);
	if (text)
		need(write(file, text, strlen(text)), path);
	else {
		off_t done = 0;

		need(fstat(source, &about), path);
		while (done < about.st_size)
			if (!need(sendfile(file, source, &done, about.st_size - done), path))
				break;
	}
	close(file);
}

void enter_view(const struct sources *from)
{
	int root;

	umask(022);
	root = mount_image(from);
	fill_dev(from, root);
	fill_proc(from, root);
	attach_directory(new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, "16m", "1777"), root, "tmp");
	attach_directory(new_mount("tmpfs", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, "16m", "755"), root, "run");
	if (mkdirat(root, "etc", 0755) && errno != EEXIST)
		fail("etc");
	/* The container's own /etc/hosts is the agent's; the image's layer holds an empty one. */
	put_file(root, "etc/hosts", 0644, -1, "127.0.0.1 localhost\n::1 localhost\n");
	attach_directory(from->target, root, "target");
	need(fchdir(root), "root");
	need(syscall(SYS_pivot_root, ".", "."), "pivot_root");
	need(syscall(SYS_umount2, ".", DETACH), "old root");
	need(chdir("/"), "root");
	/* Looked up in the view from here on. */
	need(mkdir("/run/probe", 0755), "/run/probe");
	put_file(AT_FDCWD, "/run/probe/target-path", 0755, from->program, NULL);
}
