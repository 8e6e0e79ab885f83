#include "seen.h"

#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum {
	INODES = 1 << 19,
	NAMES = 1 << 18,
	TEXT = 8 << 20,
	SLOTS = 2 * INODES, /* a power of two, never more than half full */
};

static uint64_t inodes[INODES], directories[NAMES];
static uint32_t ends[NAMES];
static char text[TEXT];
static uint32_t inode_count, name_count;
static int is_lost;
/* Number of the record plus one; 0: free. */
static uint32_t inode_slots[SLOTS], name_slots[SLOTS];
/* Where each record stands in these, so that few are forgotten quickly. */
static uint32_t slot_of_inode[INODES], slot_of_name[NAMES];

static uint32_t slot_of(uint64_t hash)
{
	return (uint32_t)((hash * 0x9e3779b97f4a7c15u) >> 40) & (SLOTS - 1);
}

static uint32_t start_of(uint32_t record)
{
	return record ? ends[record - 1] : 0;
}

static void forget(void)
{
	while (inode_count)
		inode_slots[slot_of_inode[--inode_count]] = 0;
	while (name_count)
		name_slots[slot_of_name[--name_count]] = 0;
}

void saw_loss(void)
{
	if (!is_lost)
		forget();
	is_lost = 1;
}

void saw_inode(uint64_t inode)
{
	uint32_t slot = slot_of(inode);

	if (is_lost)
		return;
	for (; inode_slots[slot]; slot = (slot + 1) & (SLOTS - 1))
		if (inodes[inode_slots[slot] - 1] == inode)
			return;
	if (inode_count == INODES) {
		saw_loss();
		return;
	}
	inodes[inode_count] = inode;
	slot_of_inode[inode_count] = slot;
	inode_slots[slot] = ++inode_count;
}

void saw_name(uint64_t directory, const char *name, size_t length)
{
	uint64_t hash = directory;
	uint32_t slot;

	if (is_lost)
		return;
	for (size_t i = 0; i < length; i++)
		hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3u;
	for (slot = slot_of(hash); name_slots[slot]; slot = (slot + 1) & (SLOTS - 1)) {
		uint32_t record = name_slots[slot] - 1, start = start_of(record);

		if (directories[record] == directory && ends[record] - start == length &&
		    !memcmp(text + start, name, length))
			return;
	}
	if (name_count == NAMES || start_of(name_count) + length > TEXT) {
		saw_loss();
		return;
	}
	memcpy(text + start_of(name_count), name, length);
	ends[name_count] = start_of(name_count) + length;
	directories[name_count] = directory;
	slot_of_name[name_count] = slot;
	name_slots[slot] = ++name_count;
}

static int write_all(int descriptor, const void *data, size_t size)
{
	for (size_t done = 0; done < size;) {
		ssize_t written = write(descriptor, (const char *)data + done, size - done);

		if (written <= 0)
			return -1;
		done += written;
	}
	return 0;
}

int answer(int descriptor)
{
	uint32_t head[3] = { is_lost, inode_count, name_count };
	int failed = write_all(descriptor, head, sizeof head) ||
		     write_all(descriptor, inodes, inode_count * sizeof *inodes) ||
		     write_all(descriptor, directories, name_count * sizeof *directories) ||
		     write_all(descriptor, ends, name_count * sizeof *ends) ||
		     write_all(descriptor, text, start_of(name_count));

	is_lost = 0;
	forget();
	return failed ? -1 : 0;
}
