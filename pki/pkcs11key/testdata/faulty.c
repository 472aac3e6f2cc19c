// A PKCS#11 module that passes each call on to the module REAL, and fails, hangs or lies where the file CONTROL says so.
// A line of it is "id function action argument times": times 0 means always. A function has its place in the list of
// functions. LOG gets a line for each call.

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { GET_TOKEN_INFO = 6, ENCRYPT = 30, DECRYPT = 34, SIGN = 43, FUNCTIONS = 68 };

typedef unsigned long (*function)(long, long, long, long, long, long, long, long);

struct list {
	long version;
	function f[FUNCTIONS];
};

static struct list *real, mine;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int hits[4096];
static unsigned char last[1024]; // the last signature
static unsigned long lastSize;

static int rule(int n, int *id, char *action, unsigned long *argument, int count)
{
	int f, times, found = 0;
	FILE *in = fopen(CONTROL, "re");
	if (!in)
		return 0;
	pthread_mutex_lock(&lock);
	while (!found && fscanf(in, "%d %d %15s %lx %d", id, &f, action, argument, &times) == 5)
		if (f == n && (!count || times == 0 || hits[*id & 4095] < times)) {
			found = 1;
			hits[*id & 4095] += count;
		}
	pthread_mutex_unlock(&lock);
	fclose(in);
	if (!found)
		*action = 0;
	return found;
}

static unsigned long hook(int n, long a, long b, long c, long d, long e, long f, long g, long h)
{
	char line[16], action[16] = "", now[16];
	int id, other, out = open(LOG, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	unsigned long argument = 0, unused, result, size;
	if (write(out, line, snprintf(line, sizeof line, "%d\n", n)) < 0)
		_exit(9);
	close(out);
	int asksSize = (n == SIGN || n == ENCRYPT || n == DECRYPT) && d == 0;
	if (!asksSize && rule(n, &id, action, &argument, 1)) {
		if (!strcmp(action, "fail"))
			return argument;
		if (!strcmp(action, "kill"))
			kill(getpid(), SIGKILL);
		while (!strcmp(action, "hang") && rule(n, &other, now, &unused, 0) && !strcmp(now, "hang"))
			usleep(2000);
	}
	result = real->f[n](a, b, c, d, e, f, g, h);
	if (!strcmp(action, "late"))
		return argument; // although it was done
	if (!strcmp(action, "killafter"))
		kill(getpid(), SIGKILL);
	if (n == GET_TOKEN_INFO && !strcmp(action, "flags"))
		*(unsigned long *)(b + 96) |= argument;
	if (n == SIGN && d && result == 0) {
		unsigned char *signature = (unsigned char *)d;
		pthread_mutex_lock(&lock);
		size = *(unsigned long *)e;
		if (!strcmp(action, "short"))
			*(unsigned long *)e = size - argument;
		if (!strcmp(action, "flip"))
			signature[size / 2 + 5] ^= 1;
		if (!strcmp(action, "swap") && lastSize == size)
			memcpy(signature, last, size);
		else if (size <= sizeof last) {
			memcpy(last, signature, size);
			lastSize = size;
		}
		pthread_mutex_unlock(&lock);
	}
	return result;
}

#define W(n) \
	static unsigned long w##n(long a, long b, long c, long d, long e, long f, long g, long h) \
	{ return hook(n, a, b, c, d, e, f, g, h); }
#define TEN(X, t) X(t##0) X(t##1) X(t##2) X(t##3) X(t##4) X(t##5) X(t##6) X(t##7) X(t##8) X(t##9)
#define ALL(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) \
	TEN(X, 1) TEN(X, 2) TEN(X, 3) TEN(X, 4) TEN(X, 5) X(60) X(61) X(62) X(63) X(64) X(65) X(66) X(67)
ALL(W)
#define PUT(n) mine.f[n] = w##n;

unsigned long C_GetFunctionList(struct list **out)
{
	void *module = dlopen(REAL, RTLD_NOW);
	unsigned long (*get)(struct list **) = module ? (unsigned long (*)(struct list **))dlsym(module, "C_GetFunctionList") : 0;
	if (!get || get(&real))
		return 5;
	mine.version = real->version;
	ALL(PUT)
	*out = &mine;
	return 0;
}
