//! Reading what is claimed, in place or with an engine.

use std::{sync::atomic::Ordering, time::Instant};

use indexmap::IndexMap;
use transport_core::{
    Error, ErrorKind, FeatureName, RegionMut, RegionSlice, RemoteAddr, Result, SessionName, Tensor,
};

use super::{
    super::{
        Inner,
        request::{Wanted, WantedTensor},
        transfer::Transfer,
    },
    group::Group,
};
use crate::{ReadOp, ReadOptions, net::timed_out, shm, tcp::ReadError};

/// The tensors of one sample, as they are handed out.
pub(super) type Tensors = IndexMap<FeatureName, Tensor>;

impl Inner {
    /// Looks at samples in the publisher's memory, or copies them out of it.
    pub(super) fn read_shared(
        &self,
        samples: &mut [Wanted],
        groups: &[Group],
        deadline: Instant,
        transfer: &Transfer,
    ) -> Result<Vec<Tensors>> {
        let mut read = room_for(samples);
        for group in groups {
            let (life, _) = group.life.as_ref().expect("shm connects");
            let arena = life.shared()?;
            for (used, &i) in group.uses.iter().zip(&group.samples) {
                let in_use = used.in_use.as_ref().expect("registered with the mapping");
                let sample = &mut samples[i];
                for j in 0..sample.tensors.len() {
                    let (address, bytes) = (sample.tensors[j].address, sample.meta(j).nbytes());
                    let destination = sample.tensors[j].region.take();
                    let data = if bytes == 0 {
                        destination.map_or_else(|| RegionMut::zeroed(0), Ok)?.freeze()
                    } else {
                        let view = arena
                            .view(address, bytes, in_use)
                            .map_err(|e| e.with("key", sample.key(j)))?;
                        match destination {
                            None => view,
                            Some(mut destination) => {
                                if Instant::now() >= deadline {
                                    return Err(timed_out("fetch").with("key", sample.key(j)));
                                }
                                shm::copy(&view, &mut destination, transfer.stop_flag())
                                    .map_err(|e| e.with("key", sample.key(j)))?;
                                self.host_bytes.fetch_add(bytes, Ordering::Relaxed);
                                destination.freeze()
                            }
                        }
                    };
                    add(&mut read[i], sample, j, data)?;
                }
            }
        }
        Ok(read)
    }

    /// Reads with an engine that fills destinations from one peer's memory at a time. With `by_host`
    /// the bytes pass through host memory wherever they go.
    pub(super) fn read_remote(
        &self,
        read_ops: impl Fn(&SessionName, Vec<ReadOp>, &ReadOptions) -> Result<Vec<ReadOp>, ReadError>,
        by_host: bool,
        samples: &mut [Wanted],
        groups: &[Group],
        deadline: Instant,
        transfer: &Transfer,
    ) -> Result<Vec<Tensors>> {
        let mut read = room_for(samples);
        for group in groups {
            let options = ReadOptions::default()
                .epoch(group.epoch)
                .deadline(deadline)
                .stop(transfer.stop_flag().clone());
            // One publisher may have had several data sessions.
            let mut from = 0;
            while let Some(&first) = group.samples.get(from) {
                let session = samples[first].arena().session.clone();
                let same = group.samples[from..]
                    .iter()
                    .take_while(|&&i| samples[i].arena().session == session)
                    .count();
                let batch = &group.samples[from..from + same];
                from += same;
                let mut ops = Vec::with_capacity(batch.len() * 4);
                for &i in batch {
                    for tensor in &mut samples[i].tensors {
                        let region = tensor.region.take().expect("only shm gives views");
                        add_ops(&mut ops, tensor, region);
                    }
                }
                let ops = read_ops(&session, ops, &options).map_err(|failed| {
                    let key = failed.op.and_then(|op| locate(samples, batch, op));
                    match key {
                        Some((i, j)) => {
                            let (expected, address) =
                                (samples[i].meta(j).nbytes(), samples[i].tensors[j].address);
                            let error = failed.error.with("key", samples[i].key(j));
                            match error.kind() {
                                ErrorKind::OutOfRange => error
                                    .with("expected", format_args!("{expected} published bytes"))
                                    .with(
                                        "found",
                                        format_args!("nothing like it at {:#x}", address.0),
                                    ),
                                _ => error,
                            }
                        }
                        None => {
                            failed.error.with("key", samples[batch[0]].descriptor.sample.clone())
                        }
                    }
                })?;
                let mut ops = ops.into_iter();
                let (mut host, mut device) = (0, 0);
                for &i in batch {
                    for j in 0..samples[i].tensors.len() {
                        let data = filled(ops.by_ref().take(samples[i].tensors[j].ops()))?;
                        let by_host = by_host || data.kind().is_host();
                        let moved = if by_host { &mut host } else { &mut device };
                        *moved += data.len() as u64;
                        add(&mut read[i], &samples[i], j, data)?;
                    }
                }
                self.host_bytes.fetch_add(host, Ordering::Relaxed);
                self.device_bytes.fetch_add(device, Ordering::Relaxed);
            }
        }
        Ok(read)
    }
}

/// An empty map for each sample, with room for its tensors.
fn room_for(samples: &[Wanted]) -> Vec<Tensors> {
    samples.iter().map(|sample| Tensors::with_capacity(sample.tensors.len())).collect()
}

/// Adds what was read of one tensor.
fn add(read: &mut Tensors, sample: &Wanted, tensor: usize, data: RegionSlice) -> Result<()> {
    let tensor_read = Tensor::new(sample.result(tensor).clone(), data)?;
    read.insert(sample.name(tensor).clone(), tensor_read);
    Ok(())
}

/// Which tensor an operation of a batch was for.
fn locate(samples: &[Wanted], batch: &[usize], op: usize) -> Option<(usize, usize)> {
    let mut first = 0;
    batch.iter().find_map(|&i| {
        let tensor = samples[i].tensors.iter().position(|tensor| {
            let of_this = (first..first + tensor.ops()).contains(&op);
            first += tensor.ops();
            of_this
        });
        tensor.map(|tensor| (i, tensor))
    })
}

/// The operations that fill `region` with what is wanted of a tensor.
fn add_ops(ops: &mut Vec<ReadOp>, tensor: &WantedTensor, region: RegionMut) {
    let Some(part) = &tensor.part else {
        ops.push(ReadOp::new(tensor.address, region));
        return;
    };
    let mut rest = region;
    for (i, range) in part.ranges.iter().enumerate() {
        let (own, tail) = rest
            .split_at((range.end - range.start) as usize)
            .expect("the region is as long as the ranges together");
        rest = tail;
        let mut op = ReadOp::new(RemoteAddr(tensor.address.0 + range.start), own);
        op.same_object = i > 0;
        ops.push(op);
    }
}

/// What the operations of one tensor have filled, in one piece as it was before.
fn filled(ops: impl Iterator<Item = ReadOp>) -> Result<RegionSlice> {
    let mut ops = ops.map(|op| op.dst.freeze());
    let Some(first) = ops.next() else { return Ok(RegionMut::zeroed(0)?.freeze()) };
    ops.try_fold(first, RegionSlice::join).map_err(|_| {
        Error::new(ErrorKind::Unexpected, "fetch", "a destination came back in pieces")
    })
}
