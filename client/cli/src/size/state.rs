//! The bytes of one layer's recurrent state.

use super::config::{self, ModelConfig, SizeError};

/// The state that one layer keeps at the end of a prefix, over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// Elements of the convolution's window.
    pub conv_elements: u64,
    /// Elements of the state itself.
    pub state_elements: u64,
    /// Bytes of one element of the convolution's window.
    pub conv_element_bytes: u32,
    /// Bytes of one element of the state.
    pub state_element_bytes: u32,
}

impl StateShape {
    /// The state of a layer, after the paper or the implementation of its kind:
    ///
    /// | kind | convolution | state |
    /// | --- | --- | --- |
    /// | gated delta net (Qwen3-Next) | (2 x key heads x key size + value heads x value size) x (kernel - 1) | value heads x key size x value size |
    /// | Mamba 2 (Bamba, Zamba2, Nemotron-H, Granite 4) | (heads x head size + 2 x groups x state size) x (kernel - 1) | heads x head size x state size |
    /// | Mamba 1 (Jamba) | inner size x (kernel - 1) | inner size x state size |
    ///
    /// `element_bytes` is the size of the KV's elements; the state has its own size if the config says so
    /// (`mamba_ssm_dtype`).
    ///
    /// # Errors
    /// [`SizeError`]: a field is missing or makes no sense.
    pub fn of(model: &ModelConfig, element_bytes: u32) -> Result<Self, SizeError> {
        // An 8-bit KV leaves the state as it is.
        let own = model.element_bytes("auto").unwrap_or(2).max(element_bytes);
        let state_element_bytes = model.text("mamba_ssm_dtype").map_or(Ok(own), config::element_bytes)?;
        let (channels, kernel, state_elements) = match model.number(&["linear_num_value_heads"])? {
            Some(value_heads) => delta_net(model, value_heads.into())?,
            None => match model.number(&["mamba_n_heads", "mamba_num_heads", "n_mamba_heads"])? {
                Some(heads) => mamba2(model, heads.into())?,
                None => mamba1(model)?,
            },
        };
        let conv_elements = channels.checked_mul(kernel - 1).ok_or(SizeError::TooLarge)?;
        Ok(Self { conv_elements, state_elements, conv_element_bytes: own, state_element_bytes })
    }

    /// Bytes on one of `tensor_parallel` ranks.
    pub fn bytes(&self, tensor_parallel: u32) -> u64 {
        let split = |elements: u64| elements.div_ceil(tensor_parallel.into());
        split(self.conv_elements)
            .saturating_mul(self.conv_element_bytes.into())
            .saturating_add(split(self.state_elements).saturating_mul(self.state_element_bytes.into()))
    }
}

/// Channels of the convolution, its kernel, and elements of the state.
type Shape = (u64, u64, u64);

fn delta_net(model: &ModelConfig, value_heads: u64) -> Result<Shape, SizeError> {
    let key_heads = u64::from(model.required(&["linear_num_key_heads"])?);
    let key_size = u64::from(model.required(&["linear_key_head_dim"])?);
    let value_size = u64::from(model.required(&["linear_value_head_dim"])?);
    let kernel = u64::from(model.required(&["linear_conv_kernel_dim"])?);
    let channels = sum([product(&[2, key_heads, key_size])?, product(&[value_heads, value_size])?])?;
    Ok((channels, kernel, product(&[value_heads, key_size, value_size])?))
}

fn mamba2(model: &ModelConfig, heads: u64) -> Result<Shape, SizeError> {
    let state_size = u64::from(model.required(&STATE_SIZE)?);
    let kernel = u64::from(model.required(&KERNEL)?);
    let head_size = mamba2_head_size(model, heads)?;
    let groups = model.number(&["mamba_n_groups", "n_groups", "mamba_ngroups"])?.unwrap_or(1);
    let channels = sum([product(&[heads, head_size])?, product(&[2, groups.into(), state_size])?])?;
    Ok((channels, kernel, product(&[heads, head_size, state_size])?))
}

fn mamba2_head_size(model: &ModelConfig, heads: u64) -> Result<u64, SizeError> {
    let names = ["mamba_d_head", "mamba_head_dim", "mamba_headdim"];
    let is_auto = names.iter().any(|name| model.text(name) == Some("auto"));
    if let Some(head_size) = if is_auto { None } else { model.number(&names)? } {
        return Ok(head_size.into());
    }
    let hidden = model.required(&["hidden_size", "d_model"])?;
    let expand = model.number(&["mamba_expand", "expand"])?.ok_or(SizeError::Missing { field: names[0] })?;
    Ok(product(&[expand.into(), hidden.into()])? / heads)
}

fn mamba1(model: &ModelConfig) -> Result<Shape, SizeError> {
    let state_size = u64::from(model.required(&STATE_SIZE)?);
    let kernel = u64::from(model.required(&KERNEL)?);
    let expand = u64::from(model.required(&["mamba_expand", "expand"])?);
    let inner = product(&[expand, model.required(&["hidden_size", "d_model"])?.into()])?;
    Ok((inner, kernel, product(&[inner, state_size])?))
}

const STATE_SIZE: [&str; 3] = ["mamba_d_state", "ssm_state_size", "state_size"];
const KERNEL: [&str; 3] = ["mamba_d_conv", "conv_kernel", "conv_kernel_size"];

fn product(factors: &[u64]) -> Result<u64, SizeError> {
    factors.iter().try_fold(1_u64, |product, &factor| product.checked_mul(factor)).ok_or(SizeError::TooLarge)
}

fn sum(terms: [u64; 2]) -> Result<u64, SizeError> {
    terms[0].checked_add(terms[1]).ok_or(SizeError::TooLarge)
}
