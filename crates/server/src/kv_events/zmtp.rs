//! As much of ZMTP 3.0 (ZeroMQ's wire protocol, rfc.zeromq.org/spec/23) as two sockets need that send a lot and are told
//! little: NULL security, PUB and ROUTER.
//!
//! The crate `zeromq` 0.7 would do, except that its decoder allocates as much as a peer says it will send, and each peer has
//! a queue of 100,000 messages. Here a peer's frames have a limit of [`MAX_FRAME`] bytes and nothing is queued for it.
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of a frame that a peer sends: a subscription, the request of a replay, or the properties of its socket.
const MAX_FRAME: u64 = 1024;
/// Most frames of a message that a peer sends.
const MAX_FRAMES: usize = 3;

/// Most bytes of the context of a PING.
const MAX_CONTEXT: usize = 16;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The first 64 bytes of both sides: signature, version, mechanism.
fn greeting() -> [u8; 64] {
    let mut bytes = [0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Greets the peer, and tells it the type of this socket, `PUB` or `ROUTER`.
pub(super) async fn handshake(
    reader: &mut (impl AsyncRead + Unpin),
    writer: &mut (impl AsyncWrite + Unpin),
    socket_type: &str,
) -> io::Result<()> {
    writer.write_all(&greeting()).await?;
    let mut theirs = [0; 64];
    reader.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 {
        return Err(wrong("this is no ZMTP 3"));
    }
    if &theirs[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(wrong("the peer wants another security mechanism than NULL"));
    }
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((socket_type.len() as u32).to_be_bytes());
    ready.extend(socket_type.as_bytes());
    let mut frame = vec![COMMAND, ready.len() as u8];
    frame.extend(ready);
    writer.write_all(&frame).await?;
    let (flags, body) = read_frame(reader).await?;
    match flags & COMMAND != 0 && body.starts_with(b"\x05READY") {
        true => Ok(()),
        false => Err(wrong("the peer is not ready")),
    }
}

async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<(u8, Vec<u8>)> {
    let flags = reader.read_u8().await?;
    let length = match flags & LONG {
        0 => u64::from(reader.read_u8().await?),
        _ => reader.read_u64().await?,
    };
    if flags & !(MORE | LONG | COMMAND) != 0 || length > MAX_FRAME {
        return Err(wrong("a frame is too long, or none"));
    }
    let mut body = vec![0; length as usize];
    reader.read_exact(&mut body).await?;
    Ok((flags, body))
}

/// What a peer sends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Message(Vec<Vec<u8>>),
    /// Its name, and what follows.
    Command(Vec<u8>),
}

impl Received {
    /// If this is a PING (ZMTP 3.1, rfc.zeromq.org/spec/37): its context, which the answer repeats.
    pub fn ping(&self) -> Option<&[u8]> {
        let Received::Command(command) = self else { return None };
        // Behind the name: 2 bytes for how long the peer waits, which is its own affair.
        let context = command.strip_prefix(b"\x04PING")?.get(2..)?;
        (context.len() <= MAX_CONTEXT).then_some(context)
    }
}

/// The answer to a PING.
pub(super) fn pong(context: &[u8]) -> Vec<u8> {
    const NAME: &[u8] = b"\x04PONG";
    // At most 21 bytes.
    let length = (NAME.len() + context.len()) as u8;
    [&[COMMAND, length], NAME, context].concat()
}

/// Not cancel-safe: what was read of a message is lost.
pub(super) async fn read(reader: &mut (impl AsyncRead + Unpin)) -> io::Result<Received> {
    let mut frames = Vec::new();
    loop {
        let (flags, body) = read_frame(reader).await?;
        if flags & COMMAND != 0 {
            return Ok(Received::Command(body));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Received::Message(frames));
        }
        if frames.len() == MAX_FRAMES {
            return Err(wrong("a message has too many frames"));
        }
    }
}

/// The bytes of a message.
pub(super) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (i, frame) in frames.iter().enumerate() {
        let more = if i + 1 < frames.len() { MORE } else { 0 };
        match u8::try_from(frame.len()) {
            Ok(length) => bytes.extend([more, length]),
            Err(_) => {
                bytes.push(more | LONG);
                bytes.extend((frame.len() as u64).to_be_bytes());
            }
        }
        bytes.extend_from_slice(frame);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read_all(mut bytes: &[u8]) -> io::Result<Received> {
        read(&mut bytes).await
    }

    #[tokio::test]
    async fn messages_are_read_as_they_are_written() {
        let (short, long) = (vec![7; 255], vec![9; 256]);
        let frames: [&[u8]; 3] = [b"", &short, &long];
        let expected = frames.map(<[u8]>::to_vec).to_vec();
        assert_eq!(read_all(&message(&frames)).await.unwrap(), Received::Message(expected));
        let command = [COMMAND, 3, 2, b'H', b'I'];
        assert_eq!(read_all(&command).await.unwrap(), Received::Command(b"\x02HI".to_vec()));
    }

    #[tokio::test]
    async fn a_ping_is_answered_with_its_context() {
        let ping = |rest: &[u8]| Received::Command([b"\x04PING", rest].concat());
        assert_eq!(ping(&[0, 10]).ping(), Some(&b""[..]));
        assert_eq!(ping(&[0, 10, 7, 8]).ping(), Some(&[7, 8][..]));
        assert_eq!(ping(&[0; 18]).ping().map(<[u8]>::len), Some(16));
        for other in [ping(&[0]), ping(&[0; 19]), Received::Command(b"\x05READY".to_vec())] {
            assert_eq!(other.ping(), None);
        }
        assert_eq!(Received::Message(vec![b"\x04PING\0\0".to_vec()]).ping(), None);
        assert_eq!(read_all(&pong(&[7, 8])).await.unwrap(), Received::Command(b"\x04PONG\x07\x08".to_vec()));
    }

    /// What a peer may do to the memory: nothing.
    #[tokio::test]
    async fn long_messages_are_refused() {
        let huge = [&[LONG][..], &(1u64 << 62).to_be_bytes()].concat();
        assert!(read_all(&huge).await.is_err());
        assert!(read_all(&message(&[&[0; MAX_FRAME as usize + 1]])).await.is_err());
        assert!(read_all(&message(&[&[0; MAX_FRAME as usize]])).await.is_ok());
        assert!(read_all(&message(&[b"", b"", b"", b""])).await.is_err());
        assert!(read_all(&[0x80, 0]).await.is_err(), "an unknown flag");
        for torn in [&b""[..], &[0], &[0, 3, 1], &[MORE, 0]] {
            assert!(read_all(torn).await.is_err(), "{torn:?}");
        }
    }

    #[tokio::test]
    async fn other_protocols_are_refused() {
        let refused = async |theirs: &[u8]| {
            let (mut reader, mut written) = (theirs, Vec::new());
            handshake(&mut reader, &mut written, "PUB").await.is_err()
        };
        let ready = b"\x04\x06\x05READY";
        assert!(!refused(&[&greeting()[..], ready].concat()).await);
        assert!(refused(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await);
        for (at, byte) in [(0, 0), (9, 0), (10, 2), (12, b'P')] {
            let mut other = greeting();
            other[at] = byte;
            assert!(refused(&[&other[..], ready].concat()).await, "byte {at}");
        }
        assert!(refused(&[&greeting()[..], b"\x00\x01a"].concat()).await, "a message before READY");
    }
}
