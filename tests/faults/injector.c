/* Fails one operation on one file, as a file system can: preloaded into a rank, and inert until `inject` is called.

   Operations are counted by kind and path: list, open, stat, read, map, write, sync, close (of what was written),
   rename, unlink and make. From the `first` that matches, `times` of them fail with `error`, or do something else:
   SHORT moves only half of the bytes, KILL ends the process. All operations below a folder are logged. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHORT = -1, KILL = -9, LENGTH = 4096 };

static struct {
  char folder[LENGTH], log[LENGTH], kind[16];
  regex_t path;
  long first, times, seen;
  int error, armed;
} rule;

int inject(const char *folder, const char *log, const char *kind, const char *path, long first, long times, int error) {
  snprintf(rule.folder, LENGTH, "%s/", folder);
  snprintf(rule.log, LENGTH, "%s", log);
  snprintf(rule.kind, sizeof rule.kind, "%s", kind);
  rule.first = first, rule.times = times, rule.error = error;
  rule.armed = !regcomp(&rule.path, path, REG_EXTENDED | REG_NOSUB);
  return rule.armed;
}

/* What is to happen to this operation instead: an errno, SHORT, or 0 for nothing. */
static int fault(const char *kind, const char *path) {
  if (strncmp(path, rule.folder, strlen(rule.folder))) return 0;
  int before = errno, wanted = 0;
  if (!strcmp(kind, rule.kind) && !regexec(&rule.path, path, 0, 0, 0)) {
    long number = __sync_add_and_fetch(&rule.seen, 1);
    if (number >= rule.first && number - rule.first < rule.times) wanted = rule.error;
  }
  char line[LENGTH + 64];
  int size = snprintf(line, sizeof line, "%d\t%s\t%s\n", wanted, kind, path);
  int log = syscall(SYS_openat, AT_FDCWD, rule.log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (log >= 0) {
    syscall(SYS_write, log, line, size);
    syscall(SYS_close, log);
  }
  if (wanted == KILL) syscall(SYS_kill, getpid(), SIGKILL);
  errno = before;
  return wanted;
}

static int fault_of(const char *kind, int file) {
  if (!rule.armed || file < 0) return 0;
  char name[64], path[LENGTH];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  int before = errno;
  long size = syscall(SYS_readlinkat, AT_FDCWD, name, path, LENGTH - 1);
  errno = before;
  if (size < 0) return 0;
  path[size] = 0;
  return fault(kind, path);
}

static int fault_at(const char *kind, int folder, const char *path) {
  if (!rule.armed || !path || !*path) return 0;
  if (*path == '/') return fault(kind, path);
  char name[64] = "/proc/self/cwd", whole[2 * LENGTH];
  if (folder != AT_FDCWD) snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
  int before = errno;
  long size = syscall(SYS_readlinkat, AT_FDCWD, name, whole, LENGTH - 1);
  errno = before;
  if (size < 0) return 0;
  snprintf(whole + size, LENGTH, "/%s", path);
  return fault(kind, whole);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(wanted, failed) do { int error_ = (wanted); if (error_ > 0) { errno = error_; return failed; } } while (0)

/* Of a path. */
#define OPEN(name) int name(const char *path, int flags, ...) { \
  REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
  FAIL(fault_at("open", AT_FDCWD, path), -1); return real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { \
  REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
  FAIL(fault_at("open", folder, path), -1); return real(folder, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)
#define FOPEN(name) FILE *name(const char *path, const char *mode) { \
  REAL(name); FAIL(fault_at("open", AT_FDCWD, path), 0); return real(path, mode); }
FOPEN(fopen) FOPEN(fopen64)
#define STAT(name, type) int name(const char *path, struct type *found) { \
  REAL(name); FAIL(fault_at("stat", AT_FDCWD, path), -1); return real(path, found); }
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
#define STATAT(name, type) int name(int folder, const char *path, struct type *found, int flags) { REAL(name); \
  FAIL(*path ? fault_at("stat", folder, path) : fault_of("stat", folder), -1); return real(folder, path, found, flags); }
STATAT(fstatat, stat) STATAT(fstatat64, stat64)
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *found) {
  REAL(statx);
  const char *volatile given = path; /* declared as never null */
  if (!given) return real(folder, path, flags, mask, found); /* Rust asks so whether the kernel has this call. */
  FAIL(*path ? fault_at("stat", folder, path) : fault_of("stat", folder), -1);
  return real(folder, path, flags, mask, found);
}
DIR *opendir(const char *path) { REAL(opendir); FAIL(fault_at("list", AT_FDCWD, path), 0); return real(path); }
int rename(const char *from, const char *to) { REAL(rename); FAIL(fault_at("rename", AT_FDCWD, to), -1); return real(from, to); }
int link(const char *from, const char *to) { REAL(link); FAIL(fault_at("rename", AT_FDCWD, to), -1); return real(from, to); }
int unlink(const char *path) { REAL(unlink); FAIL(fault_at("unlink", AT_FDCWD, path), -1); return real(path); }
int rmdir(const char *path) { REAL(rmdir); FAIL(fault_at("unlink", AT_FDCWD, path), -1); return real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); FAIL(fault_at("make", AT_FDCWD, path), -1); return real(path, mode); }

/* Of an open file. */
#define FSTAT(name, type) int name(int file, struct type *found) { \
  REAL(name); FAIL(fault_of("stat", file), -1); return real(file, found); }
FSTAT(fstat, stat) FSTAT(fstat64, stat64)
#define READDIR(name, type) struct type *name(DIR *folder) { \
  REAL(name); FAIL(fault_of("list", dirfd(folder)), 0); return real(folder); }
READDIR(readdir, dirent) READDIR(readdir64, dirent64)
#define MOVE(kind, name, arguments, ...) ssize_t name arguments { REAL(name); int wanted = fault_of(kind, file); \
  FAIL(wanted, -1); \
  return real(file, data, wanted == SHORT && size > 1 ? size / 2 : size, ##__VA_ARGS__); }
MOVE("read", read, (int file, void *data, size_t size))
MOVE("read", pread, (int file, void *data, size_t size, off_t at), at)
MOVE("read", pread64, (int file, void *data, size_t size, off64_t at), at)
MOVE("read", readv, (int file, const struct iovec *data, int size))
MOVE("write", write, (int file, const void *data, size_t size))
MOVE("write", pwrite, (int file, const void *data, size_t size, off_t at), at)
MOVE("write", pwrite64, (int file, const void *data, size_t size, off64_t at), at)
MOVE("write", writev, (int file, const struct iovec *data, int size))
int ftruncate(int file, off_t size) { REAL(ftruncate); FAIL(fault_of("write", file), -1); return real(file, size); }
int ftruncate64(int file, off64_t size) { REAL(ftruncate64); FAIL(fault_of("write", file), -1); return real(file, size); }
int fsync(int file) { REAL(fsync); FAIL(fault_of("sync", file), -1); return real(file); }
int fdatasync(int file) { REAL(fdatasync); FAIL(fault_of("sync", file), -1); return real(file); }
int close(int file) {
  REAL(close);
  int wanted = rule.armed && (fcntl(file, F_GETFL) & O_ACCMODE) != O_RDONLY ? fault_of("close", file) : 0;
  int result = real(file); /* NFS says only now that what was written is lost; the descriptor is gone all the same */
  FAIL(wanted, -1);
  return result;
}
#define MAP(name, offset) void *name(void *at, size_t size, int allowed, int flags, int file, offset from) { \
  REAL(name); FAIL(flags & MAP_ANONYMOUS ? 0 : fault_of("map", file), MAP_FAILED); \
  return real(at, size, allowed, flags, file, from); }
MAP(mmap, off_t) MAP(mmap64, off64_t)
