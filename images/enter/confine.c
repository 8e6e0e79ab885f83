/*
 * What a probe's programs must not have, although they are the image's own and not the agent's: they read files that
 * the agent wrote, and a bug in one of them must not be worth more than an exec into the container.
 *
 * Order: limits, capabilities (the bounding set first, it needs SETPCAP), no_new_privs, seccomp (it needs one of both).
 * Source: capabilities(7), seccomp(2); the list of calls follows the default profile of the engine, as a deny list.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "no seccomp filter for this architecture yet"
#endif

#define BIT(capability) (1ull << (capability))
#define KEPT                                                                                                       \
	(BIT(CAP_CHOWN) | BIT(CAP_DAC_OVERRIDE) | BIT(CAP_FOWNER) | BIT(CAP_FSETID) | BIT(CAP_KILL) |              \
	 BIT(CAP_SETUID) | BIT(CAP_SETGID) | BIT(CAP_NET_BIND_SERVICE))
#define NEW_NAMESPACES                                                                                             \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

static const int denied[] = {
	/* mounts and namespaces */
	SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_open_tree, SYS_move_mount, SYS_fsopen, SYS_fsconfig,
	SYS_fsmount, SYS_fspick, SYS_mount_setattr, 467 /* open_tree_attr */, SYS_setns, SYS_unshare,
	/* other processes, and handles that lead around paths */
	SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_getfd, SYS_kcmp, SYS_open_by_handle_at,
	SYS_name_to_handle_at, SYS_fanotify_init,
	/* the kernel */
	SYS_bpf, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_kexec_load, SYS_kexec_file_load, SYS_init_module,
	SYS_finit_module, SYS_delete_module, SYS_perf_event_open, SYS_userfaultfd, SYS_io_uring_setup,
	SYS_io_uring_enter, SYS_io_uring_register, SYS_syslog, SYS_lookup_dcookie, SYS_nfsservctl,
	/* the host */
	SYS_reboot, SYS_swapon, SYS_swapoff, SYS_acct, SYS_quotactl, 443 /* quotactl_fd */, SYS_settimeofday,
	SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime, SYS_sethostname, SYS_setdomainname, SYS_vhangup,
	SYS_mbind, SYS_set_mempolicy, SYS_migrate_pages, SYS_move_pages,
#ifdef __x86_64__
	SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_ustat, SYS_sysfs, SYS__sysctl, SYS_create_module,
	SYS_get_kernel_syms, SYS_query_module,
#endif
};

enum { DENIED = sizeof denied / sizeof *denied, FILTER = 2 * DENIED + 48 };
enum { ARGUMENT = offsetof(struct seccomp_data, args) };

struct program {
	struct sock_filter step[FILTER];
	unsigned short count;
};

static void add(struct program *to, struct sock_filter step)
{
	to->step[to->count++] = step;
}

#define LOAD(to, offset) add(to, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset))
#define ANSWER(to, value) add(to, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, value))
#define UNLESS(to, test, value, steps) add(to, (struct sock_filter)BPF_JUMP(BPF_JMP | (test) | BPF_K, value, 0, steps))

/* Little endian: the low half of an argument comes first, and it is all that these calls look at. */
static void deny_type(struct program *to, int call, int argument, uint32_t mask, const uint32_t *types, int count)
{
	UNLESS(to, BPF_JEQ, call, 3 + 2 * count);
	LOAD(to, ARGUMENT + 8 * argument);
	add(to, (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, mask));
	for (int i = 0; i < count; i++) {
		UNLESS(to, BPF_JEQ, types[i], 1);
		ANSWER(to, SECCOMP_RET_ERRNO | EPERM);
	}
	ANSWER(to, SECCOMP_RET_ALLOW);
}

static void filter_calls(void)
{
	static const uint32_t nodes[] = { S_IFCHR, S_IFBLK };
	static const uint32_t families[] = { AF_VSOCK, AF_ALG, AF_PACKET };
	struct program program = { .count = 0 };
	struct sock_fprog handle = { .filter = program.step };

	LOAD(&program, offsetof(struct seccomp_data, arch));
	add(&program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0));
	ANSWER(&program, SECCOMP_RET_KILL_PROCESS);
	LOAD(&program, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
	UNLESS(&program, BPF_JGE, 0x40000000, 1); /* x32 has the same architecture word */
	ANSWER(&program, SECCOMP_RET_KILL_PROCESS);
#endif
	for (int i = 0; i < DENIED; i++) {
		UNLESS(&program, BPF_JEQ, denied[i], 1);
		ANSWER(&program, SECCOMP_RET_ERRNO | EPERM);
	}
	UNLESS(&program, BPF_JEQ, SYS_clone3, 1); /* its flags lie in memory; every libc falls back to clone */
	ANSWER(&program, SECCOMP_RET_ERRNO | ENOSYS);
	UNLESS(&program, BPF_JEQ, SYS_clone, 4);
	LOAD(&program, ARGUMENT);
	add(&program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES, 0, 1));
	ANSWER(&program, SECCOMP_RET_ERRNO | EPERM);
	ANSWER(&program, SECCOMP_RET_ALLOW);
#ifdef SYS_mknod
	deny_type(&program, SYS_mknod, 1, S_IFMT, nodes, 2);
#endif
	deny_type(&program, SYS_mknodat, 2, S_IFMT, nodes, 2);
	deny_type(&program, SYS_socket, 0, ~0u, families, 3);
	ANSWER(&program, SECCOMP_RET_ALLOW);
	handle.len = program.count;
	need(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &handle), "seccomp");
}

static void drop_capabilities(void)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct sets[2] = { { .effective = KEPT, .permitted = KEPT } };

	need(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities");
	for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
		if (!(KEPT & BIT(capability)))
			need(prctl(PR_CAPBSET_DROP, capability), "bounding set");
	need(syscall(SYS_capset, &header, sets), "capset");
}

void confine(void)
{
	static const struct rlimit files = { 1024, 1024 }, size = { 64 << 20, 64 << 20 }, locked = { 64 << 10, 64 << 10 };

	need(setrlimit(RLIMIT_NOFILE, &files), "file limit");
	need(setrlimit(RLIMIT_FSIZE, &size), "size limit");
	need(setrlimit(RLIMIT_MEMLOCK, &locked), "lock limit");
	need(setgroups(0, NULL), "groups");
	need(syscall(SYS_setresgid, 0, 0, 0), "gid");
	need(syscall(SYS_setresuid, 0, 0, 0), "uid");
	drop_capabilities();
	need(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
	filter_calls();
}
