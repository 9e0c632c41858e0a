// Command gnet echoes on gnet: one event loop that calls a handler with what has arrived.
package main

import (
	"bytes"
	"fmt"
	"log"
	"net"
	"os"
	"syscall"

	"github.com/panjf2000/gnet/v2"
	"golang.org/x/sys/unix"
)

const (
	// Bytes of the loop's buffer, the same as a receive buffer of the product.
	bufferBytes = 16 * 1024
	// Bytes of the longest line, without what ends it.
	lineBytesMax = 64 * 1024
)

// Dies with its parent. In init, since that runs on the thread that lives as long as the process.
func init() {
	syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
}

func main() {
	handlers := map[string]gnet.EventHandler{"raw": &raw{}, "lines": &lines{}}
	if len(os.Args) != 4 || handlers[os.Args[1]] == nil || os.Args[2] != "--listen" {
		fmt.Fprintf(os.Stderr, "usage: %s raw|lines --listen ADDRESS:PORT\n", os.Args[0])
		os.Exit(2)
	}
	err := gnet.Run(handlers[os.Args[1]], "tcp://"+os.Args[3],
		gnet.WithNumEventLoop(1),
		// With this, the loop that serves connections accepts them too: otherwise a second loop does it, and
		// hands them over. The backlog is net.core.somaxconn, 4096 by default.
		gnet.WithReusePort(true),
		gnet.WithReadBufferCap(bufferBytes),
		gnet.WithTCPNoDelay(gnet.TCPNoDelay),
		gnet.WithLogger(quiet{}),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// quiet keeps the library's words away from stdout, where the first line is the address, and drops those that
// tell of no failure.
type quiet struct{}

func (quiet) Debugf(string, ...any) {}
func (quiet) Infof(string, ...any)  {}
func (quiet) Warnf(string, ...any)  {}

func (quiet) Errorf(format string, args ...any) { log.Printf(format, args...) }
func (quiet) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }

// announcer says where the engine listens when it does.
type announcer struct {
	gnet.BuiltinEventEngine
}

func (announcer) OnBoot(engine gnet.Engine) gnet.Action {
	address, err := listens(engine)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return gnet.Shutdown
	}
	fmt.Println("listening", address)
	return gnet.None
}

// listens asks the socket, since the engine keeps the address that it was given, whose port may be 0.
func listens(engine gnet.Engine) (net.Addr, error) {
	fd, err := engine.Dup()
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	name, err := unix.Getsockname(fd)
	if err != nil {
		return nil, err
	}
	switch name := name.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: name.Addr[:], Port: name.Port}, nil
	case *unix.SockaddrInet6:
		return &net.TCPAddr{IP: name.Addr[:], Port: name.Port}, nil
	}
	return nil, fmt.Errorf("%T is no address of TCP", name)
}

// raw sends back what arrived, out of the loop's buffer.
type raw struct{ announcer }

func (*raw) OnTraffic(conn gnet.Conn) gnet.Action {
	arrived, _ := conn.Next(-1)
	if _, err := conn.Write(arrived); err != nil {
		return gnet.Close
	}
	return gnet.None
}

// lines answers all that one read completes with one write. There is one loop, hence one buffer for answers.
type lines struct {
	announcer
	answers []byte
}

func (l *lines) OnTraffic(conn gnet.Conn) gnet.Action {
	arrived, _ := conn.Peek(-1)
	l.answers = l.answers[:0]
	rest := arrived
	for {
		end := bytes.IndexByte(rest, '\n')
		if end < 0 {
			break
		}
		line := bytes.TrimSuffix(rest[:end], []byte{'\r'})
		if len(line) > lineBytesMax {
			return gnet.Close
		}
		l.answers = append(append(l.answers, line...), '\n')
		rest = rest[end+1:]
	}
	if len(rest) > lineBytesMax {
		return gnet.Close
	}
	// A discard of 0 would take everything.
	if taken := len(arrived) - len(rest); taken > 0 {
		_, _ = conn.Discard(taken)
		if _, err := conn.Write(l.answers); err != nil {
			return gnet.Close
		}
	}
	return gnet.None
}
