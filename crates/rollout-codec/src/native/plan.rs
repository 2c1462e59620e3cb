//! Planning: exact sizes and a list of what goes where, before any data is touched.

use std::{io::IoSlice, ops::Range};

use transport_core::{Error, ErrorKind, Result};

use super::{
    ALIGNMENT, Header, Options, align, gather,
    index::{FieldRecord, Index, Segment, What},
    layout::{Builder, Conversion},
};
use crate::{Piece, Rollout, Section, Value, msgpack};

/// One segment: its sources, and where each starts within it.
#[derive(Debug)]
pub(super) struct Planned<'p> {
    pub(super) at: u64,
    pub(super) len: u64,
    /// Element type of the sources and of the data, where they differ.
    pub(super) convert: Conversion,
    /// Start within the segment (after conversion), and bytes; in order, without gaps.
    pub(super) sources: Vec<(u64, Piece<'p>)>,
    /// Field that the segment belongs to, for errors.
    pub(super) field: usize,
}

/// Checksums of the blocks of one part.
#[derive(Clone, Debug)]
pub struct PartSums(Vec<gather::BlockSum>);

/// An encoding that has not happened yet.
#[derive(Debug)]
pub struct Plan<'p> {
    header: Header,
    header_bytes: u64,
    segments: Vec<Planned<'p>>,
    checksums: bool,
}

impl<'p> Plan<'p> {
    /// Plans the encoding of `rollout`. Touches no row, unless rows with the same bytes are to be
    /// found. Counted rows are kept alive by the plan itself.
    pub fn new(rollout: &Rollout<'p>, options: &Options) -> Result<Self> {
        let rows = rollout.rows()?;
        let mut builder = Builder {
            segments: Vec::new(),
            end: 0,
            field: 0,
            checksums: options.checksums,
            dedup: options.dedup,
        };
        let mut narrow = options.narrow.clone();
        let mut fields = Vec::new();
        let columns = [(Section::Batch, &rollout.batch), (Section::NonTensor, &rollout.non_tensor)];
        for (section, columns) in columns {
            for (name, column) in columns {
                builder.field = fields.len();
                let wire = narrow.shift_remove(name);
                let what = builder.column(column, wire).map_err(|e| e.with("field", name))?;
                fields.push(FieldRecord { name: name.clone(), section, what });
            }
        }
        if let Some((field, _)) = narrow.first() {
            return Err(refuse("a field to narrow does not exist").with("field", field));
        }
        for (name, value) in &rollout.meta {
            builder.field = fields.len();
            let mut bytes = Vec::new();
            msgpack::write(value, &mut bytes).map_err(|e| {
                e.with("field", name).remedy("move arrays and very large numbers in columns")
            })?;
            let value = builder.made(bytes)?;
            fields.push(FieldRecord {
                name: name.clone(),
                section: Section::Meta,
                what: What::Meta { value },
            });
        }
        let data_bytes = align(builder.end).ok_or_else(too_large)?;
        let header = Header::new(options.generation, rows, data_bytes, Index { fields });
        // What no reader would take is refused here: too many fields, or nested too deeply.
        let bytes = header.to_bytes();
        Header::parse(&bytes).map_err(|e| refuse("no reader would take the header").source(e))?;
        let header_bytes = bytes.len() as u64;
        Ok(Self { header, header_bytes, segments: builder.segments, checksums: options.checksums })
    }

    /// Exact length of the header.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.header.rows()
    }

    /// What tells this rollout from others under the same name.
    pub fn generation(&self) -> u64 {
        self.header.generation()
    }

    /// Exact length of the data, a multiple of [`ALIGNMENT`].
    pub fn data_bytes(&self) -> u64 {
        self.header.data_bytes()
    }

    /// Gathers everything into `data`, which must be [`Self::data_bytes`] long, on `threads`
    /// threads (this one among them; 0 counts as 1), and returns the header.
    ///
    /// Every byte of `data` is written once. On failure its content is unspecified.
    pub fn encode_into(&self, data: &mut [u8], threads: usize) -> Result<Vec<u8>> {
        if data.len() as u64 != self.data_bytes() {
            return Err(refuse("the destination does not have the planned length")
                .with("expected_bytes", self.data_bytes())
                .with("found_bytes", data.len()));
        }
        let part = 0..self.data_bytes();
        self.join([self.encode_part(&part, data, threads)?])
    }

    /// Ranges of the data to be gathered one by one, in order: each as close to `bytes` as it gets
    /// without cutting a block of a checksum, and at least one block.
    pub fn parts(&self, bytes: u64) -> Vec<Range<u64>> {
        gather::parts(&self.segments, self.data_bytes(), bytes)
    }

    /// Gathers one of the ranges that [`Self::parts`] gave into `data`, which is as long as it, on
    /// `threads` threads. [`Self::join`] makes the header of the sums of all parts.
    pub fn encode_part(
        &self,
        part: &Range<u64>,
        data: &mut [u8],
        threads: usize,
    ) -> Result<PartSums> {
        if part.end.checked_sub(part.start) != Some(data.len() as u64)
            || part.end > self.data_bytes()
        {
            return Err(refuse("the destination does not have the length of the part")
                .with("part", format_args!("{part:?}"))
                .with("found_bytes", data.len()));
        }
        let is_last = part.end == self.data_bytes();
        gather::part(&self.segments, part, data, (threads, self.checksums), is_last)
            .map(PartSums)
            .map_err(|(field, e)| self.name_field(field, e))
    }

    /// The header, once all parts have been gathered. `sums` are theirs, in any order.
    pub fn join(&self, sums: impl IntoIterator<Item = PartSums>) -> Result<Vec<u8>> {
        if !self.checksums {
            return Ok(self.finish(&None));
        }
        let sums = sums.into_iter().flat_map(|part| part.0).collect();
        let sums = gather::join(&self.segments, sums)
            .ok_or_else(|| refuse("not every part was gathered, or one twice"))?;
        Ok(self.finish(&Some(sums)))
    }

    /// Encodes into new memory: header and data.
    pub fn encode(&self, threads: usize) -> Result<(Vec<u8>, transport_core::RegionSlice)> {
        let len = usize::try_from(self.data_bytes()).map_err(|_| too_large())?;
        let mut region = transport_core::RegionMut::zeroed(len)?;
        let header = self.encode_into(region.as_mut_bytes().expect("host memory"), threads)?;
        Ok((header, region.freeze()))
    }

    /// The header alone, for sending the data with [`Self::as_iovecs`]. Reads all sources once if
    /// there are to be checksums.
    pub fn header(&self) -> Result<Vec<u8>> {
        self.refuse_narrowing()?;
        let sums = self.checksums.then(|| self.segments.iter().map(gather::sum_sources).collect());
        Ok(self.finish(&sums))
    }

    /// The pieces of the data in order, for a transport that scatters: together they are exactly
    /// [`Self::data_bytes`] long, and nothing is copied.
    ///
    /// A field that is narrowed has no such pieces: an error.
    pub fn as_iovecs(&self) -> Result<Vec<IoSlice<'_>>> {
        static ZEROS: [u8; ALIGNMENT as usize] = [0; ALIGNMENT as usize];
        self.refuse_narrowing()?;
        let mut pieces = Vec::new();
        let mut end = 0;
        for segment in &self.segments {
            pieces.push(IoSlice::new(&ZEROS[..(segment.at - end) as usize]));
            pieces.extend(segment.sources.iter().map(|(_, source)| IoSlice::new(source)));
            end = segment.at + segment.len;
        }
        pieces.push(IoSlice::new(&ZEROS[..(self.data_bytes() - end) as usize]));
        pieces.retain(|piece| !piece.is_empty());
        Ok(pieces)
    }

    fn refuse_narrowing(&self) -> Result<()> {
        match self.segments.iter().find(|segment| segment.convert.is_some()) {
            Some(segment) => Err(self.name_field(
                segment.field,
                Error::new(ErrorKind::Unsupported, "encode rollout", "a field is narrowed")
                    .remedy("use encode_into, which converts while it gathers"),
            )),
            None => Ok(()),
        }
    }

    fn name_field(&self, field: usize, error: Error) -> Error {
        error.with("field", &self.header.index.fields[field].name)
    }

    /// The header with the sums of all segments.
    fn finish(&self, sums: &Option<Vec<u64>>) -> Vec<u8> {
        let mut header = self.header.clone();
        if let Some(sums) = sums {
            let mut sums = sums.iter();
            let mut set = |segment: &mut Segment| segment.xxh3 = sums.next().copied();
            header.index.visit(&mut set);
        }
        let bytes = header.to_bytes();
        debug_assert_eq!(bytes.len() as u64, self.header_bytes, "as long as planned");
        bytes
    }
}

pub(super) fn refuse(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidInput, "encode rollout", why)
}

pub(super) fn too_large() -> Error {
    refuse("larger than an address space")
}

/// A value as the bytes of a meta segment.
pub(super) fn meta_value(bytes: bytes::Bytes) -> Result<Value> {
    msgpack::parse(&bytes)
}
