// Command go-shed serves calls that compute, with a semaphore: what is beyond it is answered as busy.
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"time"
	"unsafe"
)

const (
	// Bytes of a connection's buffers, the same as a receive buffer of the product.
	bufferBytes = 16 * 1024
	// Calls that compute at once; with 200 µs each the last one is served after 13 ms.
	limit = 64
	// Calls of a connection that are not answered yet. Further lines wait in its socket.
	ahead = 1024
	// CLOCK_THREAD_CPUTIME_ID.
	threadClock = 3
)

// Dies with its parent. In init, since that runs on the thread that lives as long as the process.
func init() {
	syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
}

func cpuTime() time.Duration {
	var spec syscall.Timespec
	syscall.RawSyscall(syscall.SYS_CLOCK_GETTIME, threadClock, uintptr(unsafe.Pointer(&spec)), 0)
	return time.Duration(spec.Nano())
}

// compute takes this time of the CPU of its thread, which is that of the goroutine: with one CPU there is one.
func compute(work time.Duration) {
	for until := cpuTime() + work; cpuTime() < until; {
	}
}

func main() {
	args, micros := os.Args, 200
	if len(args) == 6 && args[4] == "--micros" {
		if number, err := strconv.Atoi(args[5]); err == nil {
			args, micros = args[:4], number
		}
	}
	if len(args) != 4 || args[1] != "work" || args[2] != "--listen" {
		fmt.Fprintf(os.Stderr, "usage: %s work --listen ADDRESS:PORT [--micros N]\n", os.Args[0])
		os.Exit(2)
	}
	listener, err := net.Listen("tcp", args[3])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("listening", listener.Addr())
	work := time.Duration(micros) * time.Microsecond
	semaphore := make(chan struct{}, limit)
	for {
		conn, err := listener.Accept()
		if err != nil {
			// Out of descriptors: let connections end before the next try.
			continue
		}
		go serve(conn, semaphore, work)
	}
}

// serve reads lines, each of which is a call, and has answers written in their order.
func serve(conn net.Conn, semaphore chan struct{}, work time.Duration) {
	defer conn.Close()
	calls := make(chan chan bool, ahead)
	defer close(calls)
	go answer(conn, calls)
	reader := bufio.NewReaderSize(conn, bufferBytes)
	for {
		if _, err := reader.ReadSlice('\n'); err != nil {
			return
		}
		done := make(chan bool, 1)
		select {
		case semaphore <- struct{}{}:
			go func() {
				compute(work)
				<-semaphore
				done <- true
			}()
		default:
			done <- false
		}
		calls <- done
	}
}

// answer writes all that is answered with one write.
func answer(conn net.Conn, calls chan chan bool) {
	writer := bufio.NewWriterSize(conn, bufferBytes)
	say := func(isDone bool) {
		answer := "busy\n"
		if isDone {
			answer = "done\n"
		}
		// An error ends the connection where it is read.
		_, _ = writer.WriteString(answer)
	}
	for done := range calls {
		select {
		case isDone := <-done:
			say(isDone)
		default:
			// What is answered goes before the next one is waited for.
			_ = writer.Flush()
			say(<-done)
		}
		if len(calls) == 0 {
			_ = writer.Flush()
		}
	}
}
