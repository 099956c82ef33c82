"""The norms written once more from their formulas: float64, loops over tokens and channels, real tokens only.

Independent of the package on purpose: no torch, no autograd, no shared helper. Every function takes tokens as an array
(N, C) without padding and returns arrays.
"""

from math import sqrt

import numpy as np


def layer_scale(x, groups, eps):
    """h: each channel group of each token divided by its root mean square."""
    h = np.array(x, dtype=np.float64)
    if groups == 0:
        return h
    width = h.shape[1] // groups
    for n in range(h.shape[0]):
        for g in range(groups):
            part = [float(v) for v in x[n, g * width : (g + 1) * width]]
            root = sqrt(sum(v * v for v in part) / width + eps)
            for j in range(width):
                h[n, g * width + j] = part[j] / root
    return h


def layer_scale_backward(x, dh, groups, eps):
    """The gradient of x from that of h, by the full Jacobian of each group."""
    dx = np.array(dh, dtype=np.float64)
    if groups == 0:
        return dx
    width = dx.shape[1] // groups
    for n in range(dx.shape[0]):
        for g in range(groups):
            part = [float(v) for v in x[n, g * width : (g + 1) * width]]
            upstream = [float(v) for v in dh[n, g * width : (g + 1) * width]]
            mean_sq = sum(v * v for v in part) / width + eps
            for j in range(width):
                total = 0.0
                for i in range(width):
                    jacobian = (i == j) / sqrt(mean_sq) - part[i] * part[j] / (width * mean_sq**1.5)
                    total += upstream[i] * jacobian
                dx[n, g * width + j] = total
    return dx


class Power:
    """PowerNorm, Algorithm 2 of the paper, or the recursion of the released code."""

    def __init__(self, gamma, beta, groups, eps, alpha_fwd, alpha_bkw, warmup, released):
        self.gamma, self.beta, self.groups, self.eps = gamma, beta, groups, eps
        self.alpha_fwd, self.alpha_bkw, self.warmup, self.released = alpha_fwd, alpha_bkw, warmup, released
        self.psi_sq = np.ones(len(gamma))
        self.nu = np.zeros(len(gamma))
        self.updates = 0

    def step(self, x, dy):
        """One update: y, dx, dgamma, dbeta; statistics move on."""
        n_tokens, channels = x.shape
        h = layer_scale(x, self.groups, self.eps)
        y, dh = np.zeros_like(h), np.zeros_like(h)
        dgamma, dbeta = np.zeros(channels), np.zeros(channels)
        iteration = self.updates + 1
        for c in range(channels):
            batch_psi_sq = sum(h[n, c] ** 2 for n in range(n_tokens)) / n_tokens
            psi_sq = batch_psi_sq if iteration <= self.warmup else self.psi_sq[c]
            psi = sqrt(psi_sq + self.eps)
            psi_backward = sqrt(batch_psi_sq + self.eps) if self.released else psi
            gamma_stat = lambda_stat = 0.0
            for n in range(n_tokens):
                xhat = h[n, c] / psi
                g = self.gamma[c] * dy[n, c]
                y[n, c] = self.gamma[c] * xhat + self.beta[c]
                dh[n, c] = (g - self.nu[c] * xhat) / psi_backward
                dgamma[c] += dy[n, c] * xhat
                dbeta[c] += dy[n, c]
                gamma_stat += xhat * xhat / n_tokens
                lambda_stat += g * xhat / n_tokens
            a = self.alpha_bkw
            self.nu[c] = self.nu[c] * (1 - (1 - a) * gamma_stat) + (1 - a) * lambda_stat
            a = self.alpha_fwd
            if self.released:
                if iteration < self.warmup:
                    self.psi_sq[c] = self.psi_sq[c] * (iteration - 1) / iteration + batch_psi_sq / iteration
                self.psi_sq[c] = a * self.psi_sq[c] + (1 - a) * batch_psi_sq
            elif iteration <= self.warmup:
                self.psi_sq[c] = self.psi_sq[c] * (iteration - 1) / iteration + batch_psi_sq / iteration
            else:
                self.psi_sq[c] = a * self.psi_sq[c] + (1 - a) * batch_psi_sq
        self.updates += 1
        return y, layer_scale_backward(x, dh, self.groups, self.eps), dgamma, dbeta


def power_v(x, dy, gamma, beta, groups, eps):
    """PN-V with its exact gradient by the full Jacobian over tokens: y, dx, dgamma, dbeta, batch psi^2."""
    n_tokens, channels = x.shape
    h = layer_scale(x, groups, eps)
    y, dh = np.zeros_like(h), np.zeros_like(h)
    dgamma, dbeta, psi_sq = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    for c in range(channels):
        psi_sq[c] = sum(h[n, c] ** 2 for n in range(n_tokens)) / n_tokens
        v = psi_sq[c] + eps
        for m in range(n_tokens):
            y[m, c] = gamma[c] * h[m, c] / sqrt(v) + beta[c]
            dgamma[c] += dy[m, c] * h[m, c] / sqrt(v)
            dbeta[c] += dy[m, c]
            for n in range(n_tokens):
                jacobian = (n == m) / sqrt(v) - h[n, c] * h[m, c] / (n_tokens * v**1.5)
                dh[m, c] += gamma[c] * dy[n, c] * jacobian
    return y, layer_scale_backward(x, dh, groups, eps), dgamma, dbeta, psi_sq


def batch(x, dy, gamma, beta, groups, eps):
    """BatchNorm with its exact gradient: y, dx, dgamma, dbeta, mean, unbiased variance."""
    n_tokens, channels = x.shape
    h = layer_scale(x, groups, eps)
    y, dh = np.zeros_like(h), np.zeros_like(h)
    dgamma, dbeta, mean, unbiased = (np.zeros(channels) for _ in range(4))
    for c in range(channels):
        mean[c] = sum(h[n, c] for n in range(n_tokens)) / n_tokens
        off = [h[n, c] - mean[c] for n in range(n_tokens)]
        total = sum(v * v for v in off)
        unbiased[c] = total / max(n_tokens - 1, 1)
        v = total / n_tokens + eps
        for m in range(n_tokens):
            y[m, c] = gamma[c] * off[m] / sqrt(v) + beta[c]
            dgamma[c] += dy[m, c] * off[m] / sqrt(v)
            dbeta[c] += dy[m, c]
            for n in range(n_tokens):
                jacobian = ((n == m) - 1 / n_tokens) / sqrt(v) - off[n] * off[m] / (n_tokens * v**1.5)
                dh[m, c] += gamma[c] * dy[n, c] * jacobian
    return y, layer_scale_backward(x, dh, groups, eps), dgamma, dbeta, mean, unbiased


def standardized(x, dz, eps, released=False, detach_mean=False, detach_sigma=False, scale=1.0, k=0.0):
    """Norms over the channels of a token: z = phi * y, phi = scale * (1 - k * y) constant in backward: z, dx, y.

    sigma = sqrt(biased variance + eps), or the unbiased standard deviation + eps (``released``).
    """
    n_tokens, channels = x.shape
    z, dx, ys = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for n in range(n_tokens):
        mean = sum(x[n, c] for c in range(channels)) / channels
        off = [x[n, c] - mean for c in range(channels)]
        squares = sum(v * v for v in off)
        if released:
            deviation = sqrt(squares / (channels - 1))
            sigma = deviation + eps
            d_sigma = [v / ((channels - 1) * deviation) for v in off]
        else:
            sigma = sqrt(squares / channels + eps)
            d_sigma = [v / (channels * sigma) for v in off]
        y = [v / sigma for v in off]
        phi = [scale * (1 - k * v) for v in y]
        for j in range(channels):
            ys[n, j] = y[j]
            z[n, j] = phi[j] * y[j]
            for i in range(channels):
                d_off = (i == j) - (0 if detach_mean else 1 / channels)
                # sigma as a function of x has derivative d_sigma whether or not its inner mean is seen as constant.
                jacobian = d_off / sigma - (0 if detach_sigma else off[i] * d_sigma[j] / sigma**2)
                dx[n, j] += dz[n, i] * phi[i] * jacobian
    return z, dx, ys


def layer(x, dy, gamma, beta, eps):
    """LayerNorm: y, dx, dgamma, dbeta."""
    _, dx, y = standardized(x, dy * gamma, eps)
    return y * gamma + beta, dx, (dy * y).sum(0), dy.sum(0)


def rms(x, dy, gamma, eps):
    """RMSNorm: y, dx, dgamma."""
    h = layer_scale(x, 1, eps)
    return h * gamma, layer_scale_backward(x, dy * gamma, 1, eps), (dy * h).sum(0)


def length(x, dy, g, eps):
    """ScaleNorm: y = g * x / sqrt(sum x^2 + eps), dx, dg."""
    n_tokens, channels = x.shape
    y, dx, dg = np.zeros_like(x), np.zeros_like(x), 0.0
    for n in range(n_tokens):
        square = sum(v * v for v in x[n]) + eps
        for j in range(channels):
            y[n, j] = g * x[n, j] / sqrt(square)
            dg += dy[n, j] * x[n, j] / sqrt(square)
            for i in range(channels):
                dx[n, j] += dy[n, i] * g * ((i == j) / sqrt(square) - x[n, i] * x[n, j] / square**1.5)
    return y, dx, dg
