//! Keys and frames as foyer writes and reads them.
use crate::{Bytes, Frame};
use foyer::Code;
use std::io::{Read, Write};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub [u8; 32]);

impl Code for Key {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        writer.write_all(&self.0).map_err(foyer::Error::io_error)
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<Self> {
        let mut key = [0; 32];
        reader.read_exact(&mut key).map_err(foyer::Error::io_error)?;
        Ok(Key(key))
    }

    fn estimated_size(&self) -> usize {
        self.0.len()
    }
}

#[derive(Clone, Debug)]
pub struct Stored(pub Frame);

impl Code for Stored {
    fn encode(&self, writer: &mut impl Write) -> foyer::Result<()> {
        writer
            .write_all(&self.0.head)
            .and_then(|()| writer.write_all(&self.0.body))
            .map_err(foyer::Error::io_error)
    }

    fn decode(reader: &mut impl Read) -> foyer::Result<Self> {
        // The reader ends where the value ends, so no length has to be believed.
        let mut bytes = Vec::new();
        reader.read_to_end(&mut bytes).map_err(foyer::Error::io_error)?;
        Ok(Stored(Frame::split(Bytes::from(bytes))))
    }

    fn estimated_size(&self) -> usize {
        self.0.len()
    }
}
