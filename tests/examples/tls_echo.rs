//! The example `tls_echo` with streams, whose lines no framing bounds, at its plain port.
//! `tests/clients/tls` talks TLS to it.

use ringserve_tests::Client;
use ringserve_tests::client::End;
use ringserve_tests::examples::Example;

/// Bytes of a line with its end.
const LINE_BYTES_MAX: usize = 64 << 10;

fn with_streams(driver: &str) -> Example {
    Example::start("tls_echo", &["--stream", "--plain", "127.0.0.1:0", "--shards", "1", "--driver", driver])
}

fn line(bytes: usize) -> Vec<u8> {
    let mut line = vec![b'x'; bytes];
    line[bytes - 1] = b'\n';
    line
}

#[test]
fn line_without_an_end_is_kept_up_to_its_bound() {
    for driver in ["epoll", "auto"] {
        let example = with_streams(driver);
        let addr = example.listens_at(1);
        let mut client = Client::connect(addr);
        for bytes in [1, 100, LINE_BYTES_MAX] {
            client.write(&line(bytes));
            assert!(client.read(bytes) == line(bytes), "{bytes} bytes");
        }
        client.write(b"who\n");
        assert_eq!(client.read(6), b"plain\n");
        client.write(&[b'x'; LINE_BYTES_MAX]);
        client.write(b"x");
        let (bytes, _) = client.read_to_end();
        assert_eq!(bytes, b"");
        // Others go on.
        let mut other = Client::connect(addr);
        other.write(b"who\n");
        assert_eq!(other.read(6), b"plain\n");
        drop(other);
        assert!(example.stop().success());
    }
}

#[test]
fn line_without_an_end_holds_no_drain() {
    for driver in ["epoll", "auto"] {
        let mut example = with_streams(driver);
        let addr = example.listens_at(1);
        let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(addr)).collect();
        for client in &mut clients {
            client.write(b"who\n");
            assert_eq!(client.read(6), b"plain\n");
        }
        clients[0].write(b"half of a li");
        clients[1].write(b"the last\nand half of a li");
        example.terminate();
        assert_eq!(clients.pop().unwrap().end(), End::Fin);
        assert_eq!(clients.pop().unwrap().read_to_end(), (b"the last\n".to_vec(), End::Fin));
        assert_eq!(clients.pop().unwrap().end(), End::Fin);
        assert!(example.ends().success());
    }
}
