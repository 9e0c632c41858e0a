// Talks to the echo server with gorilla/websocket and coder/websocket: URL [AUTHORITY].
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"

	coder "github.com/coder/websocket"
	gorilla "github.com/gorilla/websocket"
)

const mib = 1 << 20

var text = []byte(strings.Repeat("grüße, ringserve\n", 5000))

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func expect(is bool, what ...any) {
	if !is {
		panic(fmt.Sprint(what...))
	}
}

func messages() [][]byte {
	return [][]byte{{}, []byte("hello"), text, make([]byte, mib)}
}

func byGorilla(url string, config *tls.Config) {
	for _, deflate := range []bool{false, true} {
		dialer := gorilla.Dialer{TLSClientConfig: config, EnableCompression: deflate, WriteBufferSize: 10_000}
		dial := func() *gorilla.Conn {
			conn, answer, err := dialer.Dial(url, nil)
			check(err)
			extensions := answer.Header.Get("Sec-Websocket-Extensions")
			expect((extensions != "") == deflate, "gorilla: extensions ", extensions)
			check(conn.SetReadDeadline(time.Now().Add(time.Minute)))
			return conn
		}
		conn := dial()
		for _, kind := range []int{gorilla.TextMessage, gorilla.BinaryMessage} {
			for _, message := range messages() {
				// Longer than the buffer is in fragments.
				writer, err := conn.NextWriter(kind)
				check(err)
				_, err = writer.Write(message)
				check(err)
				check(writer.Close())
				heard, back, err := conn.ReadMessage()
				check(err)
				expect(heard == kind && bytes.Equal(back, message), "gorilla: another message of ", len(back), " bytes")
			}
		}
		ponged := false
		conn.SetPongHandler(func(data string) error {
			ponged = data == "here"
			return nil
		})
		check(conn.WriteControl(gorilla.PingMessage, []byte("here"), time.Now().Add(time.Second)))
		for n := range 1000 {
			check(conn.WriteMessage(gorilla.TextMessage, fmt.Append(nil, n)))
		}
		for n := range 1000 {
			_, back, err := conn.ReadMessage()
			check(err)
			expect(string(back) == fmt.Sprint(n), "gorilla: ", string(back), " instead of ", n)
		}
		expect(ponged, "gorilla: no pong")
		for _, code := range []int{1000, 3000, 4999} {
			conn := dial()
			check(conn.WriteControl(gorilla.CloseMessage, gorilla.FormatCloseMessage(code, "why"), time.Now().Add(time.Second)))
			_, _, err := conn.ReadMessage()
			var closed *gorilla.CloseError
			expect(errors.As(err, &closed) && closed.Code == code, "gorilla: ", err, " instead of ", code)
		}
		conn = dial()
		check(conn.WriteMessage(gorilla.BinaryMessage, make([]byte, mib+1)))
		_, _, err := conn.ReadMessage()
		expect(gorilla.IsCloseError(err, 1009), "gorilla: ", err, " instead of 1009")
	}
}

func byCoder(url string, config *tls.Config) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: config}}
	for _, mode := range []coder.CompressionMode{coder.CompressionDisabled, coder.CompressionNoContextTakeover, coder.CompressionContextTakeover} {
		dial := func() *coder.Conn {
			conn, answer, err := coder.Dial(ctx, url, &coder.DialOptions{HTTPClient: client, CompressionMode: mode})
			check(err)
			extensions := answer.Header.Get("Sec-Websocket-Extensions")
			expect((extensions != "") == (mode != coder.CompressionDisabled), "coder: extensions ", extensions)
			conn.SetReadLimit(-1)
			return conn
		}
		conn := dial()
		for _, kind := range []coder.MessageType{coder.MessageText, coder.MessageBinary} {
			for _, message := range messages() {
				writer, err := conn.Writer(ctx, kind)
				check(err)
				// Two fragments.
				_, err = writer.Write(message[:len(message)/2])
				check(err)
				_, err = writer.Write(message[len(message)/2:])
				check(err)
				check(writer.Close())
				heard, back, err := conn.Read(ctx)
				check(err)
				expect(heard == kind && bytes.Equal(back, message), "coder: another message of ", len(back), " bytes")
			}
		}
		reading := conn.CloseRead(ctx)
		check(conn.Ping(ctx))
		expect(reading.Err() == nil, "coder: ", reading.Err())
		check(conn.Close(3000, "why"))
		conn = dial()
		go func() { _ = conn.Write(ctx, coder.MessageBinary, make([]byte, mib+1)) }()
		_, _, err := conn.Read(ctx)
		expect(coder.CloseStatus(err) == 1009, "coder: ", err, " instead of 1009")
	}
}

func main() {
	url := os.Args[1]
	config := &tls.Config{}
	if len(os.Args) > 2 {
		pem, err := os.ReadFile(os.Args[2])
		check(err)
		config.RootCAs = x509.NewCertPool()
		expect(config.RootCAs.AppendCertsFromPEM(pem), "no certificate in ", os.Args[2])
	}
	byGorilla(url, config)
	byCoder(url, config)
	fmt.Println("go:", url)
}
