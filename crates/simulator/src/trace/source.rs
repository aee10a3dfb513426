//! Reads lines from bytes: detects compression by the first bytes and bounds the length of a line.
use super::row::RowError;
use flate2::read::MultiGzDecoder;
use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, BufReader, Cursor, Read};

/// Maximum length of a line in bytes. A prompt of two million token ids fits.
const MAX_LINE: u64 = 32 << 20;

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Decompresses `input` if it begins like gzip (RFC 1952) or zstd (RFC 8878). Several consecutive frames form one
/// text.
pub(super) fn decompressed<'a>(mut input: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut head = Vec::with_capacity(4);
    input.by_ref().take(4).read_to_end(&mut head)?;
    let is_gzip = head.starts_with(&GZIP);
    let is_zstd = head == ZSTD;
    let whole = BufReader::new(Cursor::new(head).chain(input));
    Ok(if is_gzip {
        Box::new(MultiGzDecoder::new(whole))
    } else if is_zstd {
        Box::new(Zstd { input: whole, decoder: FrameDecoder::new(), in_frame: false })
    } else {
        Box::new(whole)
    })
}

/// Reads consecutive zstd frames; the decoder below handles only one.
struct Zstd<R> {
    input: R,
    decoder: FrameDecoder,
    in_frame: bool,
}

impl<R: BufRead> Read for Zstd<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.in_frame {
                if self.input.fill_buf()?.is_empty() {
                    return Ok(0);
                }
                self.in_frame = self.next_frame()?;
            } else if self.decoder.can_collect() > 0 {
                return self.decoder.read(buf);
            } else if self.decoder.is_finished() {
                let (declared, found) =
                    (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum());
                if declared.is_some() && declared != found {
                    return Err(damaged("the checksum of a frame does not match its content"));
                }
                self.in_frame = false;
            } else {
                let blocks = BlockDecodingStrategy::UptoBlocks(1);
                self.decoder.decode_blocks(&mut self.input, blocks).map_err(damaged)?;
            }
        }
    }
}

impl<R: BufRead> Zstd<R> {
    /// Starts a frame, or skips one without data. Returns false for the latter.
    fn next_frame(&mut self) -> io::Result<bool> {
        match self.decoder.init(&mut self.input) {
            Ok(()) => Ok(true),
            Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                length, ..
            })) => {
                let length = u64::from(length);
                let passed = io::copy(&mut self.input.by_ref().take(length), &mut io::sink())?;
                if passed < length { Err(damaged("it ends within a frame")) } else { Ok(false) }
            }
            Err(error) => Err(damaged(error)),
        }
    }
}

fn damaged(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the zstd data are damaged: {what}"))
}

/// Iterates over lines with their numbers, from 1.
pub(super) struct Lines<'a> {
    input: BufReader<Box<dyn Read + 'a>>,
    line: Vec<u8>,
    number: u64,
}

impl<'a> Lines<'a> {
    pub(super) fn new(input: Box<dyn Read + 'a>) -> Lines<'a> {
        Lines { input: BufReader::with_capacity(1 << 16, input), line: Vec::new(), number: 0 }
    }

    /// The next line without its line ending, or the error in it; `None` at the end of the file.
    pub(super) fn next(&mut self) -> io::Result<Option<(u64, Result<&str, RowError>)>> {
        self.line.clear();
        if self.input.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut self.line)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        if self.line.len() as u64 > MAX_LINE && self.line.last() != Some(&b'\n') {
            self.pass_over()?;
            let found = format!("more than {} MiB", MAX_LINE >> 20);
            return Ok(Some((self.number, Err(RowError::new("(line)", found, "a row per line")))));
        }
        let mut line = self.line.as_slice();
        if self.number == 1 {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        line = line.strip_suffix(b"\n").unwrap_or(line);
        line = line.strip_suffix(b"\r").unwrap_or(line);
        let text = std::str::from_utf8(line).map_err(|error| {
            let found = format!("bytes that are not UTF-8 at byte {}", error.valid_up_to());
            RowError::new(
                "(line)",
                found,
                "UTF-8 text; is the file compressed in a way other than gzip and zstd?",
            )
        });
        Ok(Some((self.number, text)))
    }

    fn pass_over(&mut self) -> io::Result<()> {
        loop {
            let buffer = self.input.fill_buf()?;
            if buffer.is_empty() {
                return Ok(());
            }
            match buffer.iter().position(|byte| *byte == b'\n') {
                Some(at) => {
                    self.input.consume(at + 1);
                    return Ok(());
                }
                None => {
                    let n = buffer.len();
                    self.input.consume(n);
                }
            }
        }
    }
}
