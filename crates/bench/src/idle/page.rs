//! An open page of an admin endpoint, as its server sees it: a reader of `/events`.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time limit of the first report.
const REPORT_MAX: Duration = Duration::from_secs(60);

/// A reader of the events that an open page reads.
pub(super) struct Page {
    stream: BufReader<TcpStream>,
}

impl Page {
    /// Opens the page, and waits for its first report.
    pub(super) fn open(admin: SocketAddr) -> io::Result<Page> {
        let mut stream = TcpStream::connect(admin)?;
        write!(stream, "GET /events HTTP/1.1\r\nHost: {admin}\r\n\r\n")?;
        let mut page = Page { stream: BufReader::new(stream) };
        match page.reports_until(Instant::now() + REPORT_MAX, 1)? {
            0 => Err(io::Error::new(ErrorKind::TimedOut, format!("{admin}: no report in {REPORT_MAX:?}"))),
            _ => Ok(page),
        }
    }

    /// The number of reports that arrive within `time`.
    pub(super) fn watch(&mut self, time: Duration) -> io::Result<usize> {
        self.reports_until(Instant::now() + time, usize::MAX)
    }

    fn reports_until(&mut self, end: Instant, most: usize) -> io::Result<usize> {
        let (mut reports, mut line) = (0, Vec::new());
        while reports < most {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            self.stream.get_ref().set_read_timeout(Some(left))?;
            match self.stream.read_until(b'\n', &mut line) {
                Ok(0) => {
                    return Err(io::Error::new(
                        ErrorKind::UnexpectedEof,
                        "the admin endpoint ended the page",
                    ));
                }
                Ok(_) => {
                    reports += usize::from(line.starts_with(b"data:"));
                    line.clear();
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(reports)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn reports_are_counted_and_other_lines_are_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let admin = listener.local_addr().unwrap();
        let server = thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            assert!(BufReader::new(&socket).lines().any(|line| line.unwrap().is_empty()));
            socket
                .write_all(b"HTTP/1.1 200 OK\r\n\r\n6\r\ndata: 1\n\n\r\n: here\n\ndata: 2\n\ndata: 3\n")
                .unwrap();
        });
        let mut page = Page::open(admin).unwrap();
        server.join().unwrap();
        assert_eq!(page.watch(Duration::ZERO).unwrap(), 0);
        assert_eq!(page.reports_until(Instant::now() + REPORT_MAX, 2).unwrap(), 2);
        assert_eq!(page.watch(REPORT_MAX).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    }
}
