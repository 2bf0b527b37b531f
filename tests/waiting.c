/* Waiting ranks sleep where MPI lets them yield: a rank that yields is still ready to run, and on
   two cores takes the time of those that it waits for.  Whoever waits long sleeps longer, up to a
   fifth of a millisecond, since each look takes time, too.  See jobs.py. */

#include <time.h>

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1000000000L * time.tv_sec + time.tv_nsec;
}

int sched_yield(void) {
    static __thread long nanoseconds, last;
    struct timespec moment = {0, 0};
    /* Whoever has done something else since the last call begins a wait. */
    nanoseconds = now() - last > 50000 ? 10000 : nanoseconds + nanoseconds / 4;
    moment.tv_nsec = nanoseconds = nanoseconds < 200000 ? nanoseconds : 200000;
    nanosleep(&moment, 0);
    last = now();
    return 0;
}
