//! Compares what the trainer read with checksums made where it was filled.

use std::collections::BTreeMap;

use control_proto::capture::{Checksum, ChecksumKind};
use transport_core::{Error, ErrorKind, Fetched, RegionSlice, Result};

use super::messages::Job;
use crate::{choose::Choice, config::Config, input::sha256_hex, source::checksum};

/// Compares samples; tensors on a device are summed up there. Threads may share it.
#[derive(Debug)]
pub(super) struct Checker {
    #[cfg(feature = "cuda")]
    device: Option<transport_mooncake_direct::cuda::DeviceTensors>,
}

impl Checker {
    /// One for what comes by the chosen transport.
    pub(super) fn new(config: &Config, choice: &Choice) -> Result<Self> {
        #[cfg(feature = "cuda")]
        {
            use capture_arena::cuda::{Device, driver};
            use transport_mooncake_direct::cuda::DeviceTensors;

            let chosen: crate::TransportChoice = choice.chosen.parse()?;
            let open = || DeviceTensors::load(&Device::open(driver()?, config.device)?);
            let device = chosen.is_of_devices().then(open).transpose()?;
            Ok(Self { device })
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (config, choice);
            Ok(Self {})
        }
    }

    /// Bytes compared, and the tensors that differ.
    pub(super) fn compare(&self, job: &Job, fetched: &Fetched) -> Result<(u64, Vec<String>)> {
        let mut bytes = 0;
        let mut differing = Vec::new();
        let on_device = self.sums_on_device(fetched)?;
        for (at, (name, tensor)) in fetched.tensors.iter().enumerate() {
            let key = || fetched.descriptor.sample.object(name).to_string();
            let sum = |sums: &Option<BTreeMap<String, String>>| {
                sums.as_ref()?.get(name.as_str()).cloned()
            };
            let expected = sum(&job.checksums).map(|sum| sum.parse::<Checksum>()).transpose()?;
            // Only the host makes these; what was on its way to a device was compared there.
            let sha256 = sum(&job.sha256).filter(|_| on_device.is_none());
            if expected.is_none() && sha256.is_none() {
                let why = "a tensor came without checksum";
                return Err(Error::new(ErrorKind::NotFound, "compare", why)
                    .with("key", key())
                    .remedy(
                        "the server must answer x-featurestore-checksums; or give --no-verify",
                    ));
            }
            let same = match &on_device {
                Some(sums) => expected == Some(Checksum::new(ChecksumKind::Mixsum, sums[at])),
                None => {
                    let found = host_bytes(&tensor.data)?;
                    expected.is_none_or(|sum| sum == checksum(sum.kind, found))
                        && sha256.is_none_or(|sum| sum == sha256_hex(found))
                }
            };
            bytes += tensor.data.len() as u64;
            if !same {
                differing.push(key());
            }
        }
        Ok((bytes, differing))
    }

    /// The sums of a sample's tensors, if they are on a device. No byte comes to the host.
    fn sums_on_device(&self, fetched: &Fetched) -> Result<Option<Vec<u64>>> {
        #[cfg(feature = "cuda")]
        if let Some(device) = &self.device {
            use std::time::{Duration, Instant};

            /// Longest time for one sample: a device that needs more is stuck.
            const BOUND: Duration = Duration::from_secs(30);
            let tensors: Vec<_> = fetched.tensors.values().map(|t| t.data.clone()).collect();
            return device.sums(&tensors, Instant::now() + BOUND).map(Some);
        }
        let _ = fetched;
        Ok(None)
    }
}

fn host_bytes(data: &RegionSlice) -> Result<&[u8]> {
    data.as_bytes().ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "compare", "a tensor is not in host memory")
    })
}
