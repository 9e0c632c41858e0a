// Command go-net echoes with the standard library: a goroutine per connection, bufio for lines, and crypto/tls.
package main

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"syscall"
	"time"
)

const (
	// Bytes of a connection's buffers, the same as a receive buffer of the product.
	bufferBytes = 16 * 1024
	// Bytes of the longest line, without what ends it.
	lineBytesMax = 64 * 1024
)

// Dies with its parent. In init, since that runs on the thread that lives as long as the process.
func init() {
	syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGKILL), 0)
}

func main() {
	serves := map[string]func(net.Conn) error{"raw": raw, "lines": lines, "tls": raw}
	if len(os.Args) != 4 || serves[os.Args[1]] == nil || os.Args[2] != "--listen" {
		fmt.Fprintf(os.Stderr, "usage: %s raw|lines|tls --listen ADDRESS:PORT\n", os.Args[0])
		os.Exit(2)
	}
	serve := serves[os.Args[1]]
	// The library's backlog is net.core.somaxconn, 4096 by default, and it sets TCP_NODELAY on what it accepts.
	listener, err := net.Listen("tcp", os.Args[3])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Args[1] == "tls" {
		config, err := certified()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		listener = tls.NewListener(listener, config)
	}
	fmt.Println("listening", listener.Addr())
	for {
		conn, err := listener.Accept()
		if err != nil {
			// Out of descriptors: let connections end before the next try.
			continue
		}
		go func() {
			defer conn.Close()
			// An error ends this connection, whatever it is.
			_ = serve(conn)
		}()
	}
}

// certified makes a certificate for P-256, which the generator believes.
func certified() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}, NotBefore: now, NotAfter: now.AddDate(1, 0, 0)}
	made, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{made}, PrivateKey: key}}}, nil
}

// raw sends back what arrives. Not io.Copy, which for two sockets would splice through a pipe: two calls and
// two descriptors more for each read.
func raw(conn net.Conn) error {
	buffer := make([]byte, bufferBytes)
	for {
		count, err := conn.Read(buffer)
		if err != nil {
			return err
		}
		if _, err := conn.Write(buffer[:count]); err != nil {
			return err
		}
	}
}

// flushFirst sends what was answered before it waits for more.
type flushFirst struct {
	net.Conn
	answers *bufio.Writer
}

func (f flushFirst) Read(buffer []byte) (int, error) {
	if err := f.answers.Flush(); err != nil {
		return 0, err
	}
	return f.Conn.Read(buffer)
}

// lines answers all that one read completes with one write.
func lines(conn net.Conn) error {
	writer := bufio.NewWriterSize(conn, bufferBytes)
	reader := bufio.NewReaderSize(flushFirst{conn, writer}, bufferBytes)
	// What has come of a line that is longer than the reader's buffer.
	var long []byte
	for {
		// Without a copy, unlike ReadBytes and Scanner.Text.
		line, err := reader.ReadSlice('\n')
		if len(long)+len(line) > lineBytesMax+len("\r\n") {
			return errors.New("a line is longer than 64 KiB")
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			long = append(long, line...)
			continue
		}
		if err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		if len(long) > 0 {
			line = append(long, line...)
			long = long[:0]
		}
		line = bytes.TrimSuffix(line[:len(line)-1], []byte{'\r'})
		if len(line) > lineBytesMax {
			return errors.New("a line is longer than 64 KiB")
		}
		if _, err := writer.Write(line); err != nil {
			return err
		}
		if err := writer.WriteByte('\n'); err != nil {
			return err
		}
	}
}
