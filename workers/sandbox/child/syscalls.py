"""The system calls that a confined process may make, by their numbers on x86-64 and on 64-bit ARM.

What is not here is refused: starting processes and threads, sockets, mounts, namespaces, tracing, keys,
shared memory, io_uring, and whatever kernels learn later. The numbers are the kernel's own, and never change;
the test compares them with libseccomp's.
"""

from __future__ import annotations

#: ``uname().machine`` -> the audit architecture that the kernel says with each call, and the column below.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

#: Whatever their arguments.
PLAIN = """
    open 2 -, openat 257 56, creat 85 -, read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67,
    pwrite64 18 68, preadv 295 69, pwritev 296 70, preadv2 327 286, pwritev2 328 287, lseek 8 62, stat 4
    -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44, access 21
    -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents 78 -, getdents64
    217 61, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat
    264 38, renameat2 316 276, link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, truncate 76 45,
    ftruncate 77 46, fallocate 285 47, fadvise64 221 223, fsync 74 82, fdatasync 75 83, sync_file_range
    277 84, flock 73 32, sendfile 40 71, copy_file_range 326 285, splice 275 76, tee 276 77, getxattr 191
    8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11, llistxattr 195 12, flistxattr 196 13, getcwd
    79 17, chdir 80 49, fchdir 81 50, umask 95 166,
    dup 32 23, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create
    213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441
    441, eventfd 284 -, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime
    287 87, recvfrom 45 207, shutdown 48 210, getsockopt 55 209, setsockopt 54 208, getsockname 51 204,
    getpeername 52 205,
    brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, msync 26 227,
    mincore 27 232,
    clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, gettimeofday
    96 169, time 201 -, times 100 153, alarm 37 -, getitimer 36 102, setitimer 38 103, timer_create 222
    107, timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111,
    exit 60 93, exit_group 231 94, restart_syscall 219 128, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, rt_sigreturn 15 139,
    sigaltstack 131 132, pause 34 -, futex 202 98, sched_yield 24 124, sched_getaffinity 204 123,
    sched_getparam 143 121, sched_getscheduler 145 120, getpriority 140 141, getcpu 309 168, getrandom 318
    278, sysinfo 99 179, uname 63 160, getpid 39 172, gettid 186 178, getppid 110 173, getpgrp 111 -,
    getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
    getresuid 118 148, getresgid 120 150, getgroups 115 158, getrlimit 97 163, setrlimit 160 164,
    getrusage 98 165, capget 125 90, set_robust_list 273 99, rseq 334 293
"""

#: These too, where no files but the process's own are its user's: Landlock does not know them.
METADATA = """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54,
    utime 132 -, utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16
"""

#: With some arguments only, see ``seccomp.checks``.
CHECKED = """
    close 3 57, dup2 33 -, dup3 292 24, fcntl 72 25, ioctl 16 29, socketpair 53 199, sendto 44 206, kill
    62 129, tgkill 234 131, prlimit64 302 261
"""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Name -> number, of those that the machine has."""
    column = MACHINES[machine][1]
    rows = (entry.split() for entry in table.split(","))
    return {name: int(found[column]) for name, *found in rows if found[column] != "-"}
