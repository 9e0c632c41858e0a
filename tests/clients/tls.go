// Asks examples/tls_echo who it sees, and once more with the session of before: PORT AUTHORITY VERSION. With a fourth argument, h1 or
// h2, gets the page of examples/https instead.
package main

import (
	"bufio"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func main() {
	pem, err := os.ReadFile(os.Args[2])
	check(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	version := map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}[os.Args[3]]
	config := &tls.Config{RootCAs: roots, ServerName: "localhost", MinVersion: version, MaxVersion: version,
		ClientSessionCache: tls.NewLRUClientSessionCache(4)}
	if len(os.Args) > 4 {
		transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: os.Args[4] == "h2"}
		client := &http.Client{Transport: transport, Timeout: 20 * time.Second}
		answer, err := client.Get("https://localhost:" + os.Args[1] + "/")
		check(err)
		_, err = io.Copy(os.Stdout, answer.Body)
		check(err)
		return
	}
	for range 2 {
		conn, err := tls.Dial("tcp", "127.0.0.1:"+os.Args[1], config)
		check(err)
		check(conn.SetDeadline(time.Now().Add(20 * time.Second)))
		_, err = conn.Write([]byte("who\n"))
		check(err)
		reader := bufio.NewReader(conn)
		line, err := reader.ReadString('\n')
		check(err)
		fmt.Print(line)
		check(conn.CloseWrite())
		// close_notify is the end; a FIN alone would be io.ErrUnexpectedEOF.
		_, err = io.ReadAll(reader)
		check(err)
		conn.Close()
	}
}
