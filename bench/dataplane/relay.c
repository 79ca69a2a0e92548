/* The least that a router of this kind costs on this machine: passes on bytes between each client and one worker.
   `relay PORT WORKER_PORT...` listens on 127.0.0.1. It reads no HTTP, and waits when a receiver does not read. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

static int set, other[1 << 16]; /* `other`: the connection to which a connection's bytes go; 0: none */
static char data[1 << 18];

static struct sockaddr_in local(const char *port) {
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(port)), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void watch(int connection) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = connection};
    int on = 1;
    setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_ctl(set, EPOLL_CTL_ADD, connection, &event);
}

static void pass_on(int from) {
    ssize_t size = recv(from, data, sizeof data, 0), sent = 0;
    for (ssize_t done = 0; done < size && sent >= 0; done += sent) {
        sent = send(other[from], data + done, size - done, MSG_NOSIGNAL);
    }
    if (size <= 0 || sent < 0) {
        int to = other[from];
        other[from] = other[to] = 0;
        close(from);
        close(to);
    }
}

int main(int count, char **ports) {
    struct sockaddr_in address = local(ports[1]);
    int listening = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) != 0 || listen(listening, 4096) != 0) {
        return 1;
    }
    set = epoll_create1(0);
    watch(listening);
    for (int accepted = 0;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(set, events, 256, -1);
        for (int at = 0; at < ready; ++at) {
            int connection = events[at].data.fd;
            if (connection == listening) {
                struct sockaddr_in worker = local(ports[2 + accepted++ % (count - 2)]);
                int client = accept(listening, NULL, NULL), upstream = socket(AF_INET, SOCK_STREAM, 0);
                connect(upstream, (struct sockaddr *)&worker, sizeof worker);
                other[client] = upstream;
                other[upstream] = client;
                watch(client);
                watch(upstream);
            } else if (other[connection] != 0) {
                pass_on(connection);
            }
        }
    }
}
