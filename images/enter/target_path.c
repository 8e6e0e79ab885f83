/*
 * target-path PATH - prints where below /target the file lies that PATH names in the container.
 *
 * A probe cannot follow symbolic links of the container: /target is mounted "nosymfollow", because a link is the
 * agent's word on which file is judged (one to /proc/self/cmdline would hold whatever `grep` looks for). This resolves
 * them with /target as the root, as the container itself would: `grep x "$(target-path /etc/alternatives/editor)"`.
 * What it prints is a path without links; one that is put there later is an error, not followed.
 */
#define _GNU_SOURCE
#include "enter.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LINKS = 40 };

static int refuse(const char *path, int code)
{
	fprintf(stderr, "target-path: %s: %s\n", path, strerror(code));
	return 1;
}

int target_path(const char *path)
{
	char found[2 * PATH_MAX] = "/target";
	char left[2 * PATH_MAX], link[PATH_MAX], tail[2 * PATH_MAX];
	const size_t root = strlen(found);
	int links = 0;

	if (strlen(path) >= PATH_MAX)
		return refuse(path, ENAMETOOLONG);
	strcpy(left, path);
	while (*left) {
		size_t skip = strspn(left, "/"), name = strcspn(left + skip, "/"), end = strlen(found);
		const char *component = left + skip;
		struct stat about;
		ssize_t length;

		if (!name)
			break;
		if (end + name + 2 > PATH_MAX)
			return refuse(path, ENAMETOOLONG);
		strcpy(tail, component + name);
		if (name == 2 && !memcmp(component, "..", 2)) {
			if (end > root)
				*strrchr(found, '/') = 0;
		} else if (name != 1 || *component != '.') {
			sprintf(found + end, "/%.*s", (int)name, component);
			if (lstat(found, &about))
				return refuse(path, errno);
			if (S_ISLNK(about.st_mode)) {
				if (++links > LINKS)
					return refuse(path, ELOOP);
				length = readlink(found, link, sizeof link - 1);
				if (length < 0)
					return refuse(path, errno);
				link[length] = 0;
				found[*link == '/' ? root : end] = 0;
				if (length + strlen(tail) + 2 > sizeof left)
					return refuse(path, ENAMETOOLONG);
				memcpy(left, link, length);
				strcpy(left + length, tail);
				continue;
			}
		}
		strcpy(left, tail);
	}
	return puts(found) < 0;
}
